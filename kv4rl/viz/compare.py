"""Ours over the paper's, one dot a quantity: how far each answered number lies from the published one."""

from collections.abc import Sequence

import plotly.graph_objects as go

from kv4rl.compare import Comparison
from kv4rl.paper import Published
from kv4rl.viz.style import PRECISION_COLOURS

SCOPE_COLOURS = {"measured": PRECISION_COLOURS["kv4rl"], "simulated": PRECISION_COLOURS["kv8"]}


def over_paper(answers: Sequence[tuple[Comparison, Published, dict[str, str]]]) -> go.Figure:
    """Ratio ours / paper with the interval of our row, on a logarithmic axis; 1 is the paper's own number.

    Args: answered comparisons whose unit is the paper's (`compare.answers`), in the order to draw them.
    """
    figure = go.Figure()
    for scope, colour in SCOPE_COLOURS.items():
        mine = [(item, published, row) for item, published, row in answers if row["scope"] == scope]
        ratio = lambda published, row, name: float(row[name] or row["value"]) / published.value
        x = [ratio(published, row, "value") for _, published, row in mine]
        error = {
            "array": [ratio(p, row, "high") - value for (_, p, row), value in zip(mine, x, strict=True)],
            "arrayminus": [value - ratio(p, row, "low") for (_, p, row), value in zip(mine, x, strict=True)],
        }
        names = [f"{item.quantity}, {published.locator}" for item, published, _ in mine]
        figure.add_scatter(x=x, y=names, error_x=error, mode="markers", name=scope, marker={"color": colour, "size": 9})
    figure.add_vline(x=1, line={"dash": "dash", "width": 1})
    figure.update_xaxes(type="log", title_text="ours / paper", tickvals=[0.1, 0.2, 0.5, 1, 2, 5, 10])
    figure.update_yaxes(autorange="reversed", tickfont={"size": 11})
    figure.update_layout(
        height=140 + 26 * len(answers), width=980, margin={"l": 440}, legend={"orientation": "h", "y": 1.08}
    )
    return figure
