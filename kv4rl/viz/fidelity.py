"""Fidelity figures: sampler KL per precision with its bootstrap interval (Fig. 4b's axes at our scale)."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES


def sampler_kl_bars(rows: Sequence[Mapping[str, str]], *, title: str = "") -> go.Figure:
    """One bar a precision, log axis, 95 % response-cluster bootstrap intervals.

    Args: rows of `fidelity.csv` with metric `sampler_kl`; arms not named after a precision are left out.
    """
    order = [precision for precision in PRECISION_COLOURS if any(row["arm"] == precision for row in rows)]
    chosen = [next(row for row in reversed(rows) if row["arm"] == precision) for precision in order]
    values = [float(row["value"]) for row in chosen]
    figure = go.Figure(
        go.Bar(
            x=[PRECISION_NAMES[precision] for precision in order],
            y=values,
            marker_color=[PRECISION_COLOURS[precision] for precision in order],
            text=[f"{value:.2e}" for value in values],
            textposition="inside",
            insidetextanchor="start",
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [float(row["high"]) - value for row, value in zip(chosen, values, strict=True)],
                "arrayminus": [value - float(row["low"]) for row, value in zip(chosen, values, strict=True)],
            },
        )
    )
    figure.update_yaxes(type="log", title_text="sampler KL, nats (Eq. 5.2)", exponentformat="power", dtick=1)
    figure.update_layout(title=title, height=380, width=560)
    return figure
