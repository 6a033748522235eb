"""Fidelity figures: sampler KL and its interval by precision, arm, width and stored bytes (Fig. 4, A3, A4)."""

import re
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.fidelity.pareto import Point, front
from kv4rl.viz.style import ACCENT, PRECISION_COLOURS, PRECISION_NAMES

KL_AXIS = {"type": "log", "title_text": "sampler KL, nats (Eq. 5.2)", "exponentformat": "power", "dtick": 1}
WIDTHS = re.compile(r"kv4rl-s(\d+)-w(\d+)")
DEFAULT_WIDTHS = (16, 128)


def error_bars(rows: Sequence[Mapping[str, str]]) -> dict:
    """plotly's asymmetric error bars from `low` and `high`."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [float(row["high"]) - float(row["value"]) for row in rows],
        "arrayminus": [float(row["value"]) - float(row["low"]) for row in rows],
    }


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
            error_y=error_bars(chosen),
        )
    )
    figure.update_yaxes(KL_AXIS)
    figure.update_layout(title=title, height=380, width=560)
    return figure


def arm_bars(rows: Sequence[Mapping[str, str]], *, title: str = "") -> go.Figure:
    """One bar an arm in the rows' order, log axis, with intervals: Fig. 4b, A3a,c, A4a and A4c.

    Args: rows of `fidelity.csv` with metric `sampler_kl`, of one model and shape.
    """
    colours = [PRECISION_COLOURS.get(row["arm"], ACCENT) for row in rows]
    bars = go.Bar(
        x=[PRECISION_NAMES.get(row["arm"], row["arm"]) for row in rows],
        y=[float(row["value"]) for row in rows],
        marker_color=colours,
        error_y=error_bars(rows),
    )
    figure = go.Figure(bars)
    figure.update_yaxes(KL_AXIS)
    figure.update_layout(title=title, height=420, width=90 * len(rows) + 160)
    return figure


def widths(arm: str) -> tuple[int, int] | None:
    """(s, w) of a `kv4rl` arm's name; None for any other arm."""
    if arm == "kv4rl":
        return DEFAULT_WIDTHS
    named = WIDTHS.fullmatch(arm)
    return (int(named[1]), int(named[2])) if named else None


def width_sweeps(rows: Sequence[Mapping[str, str]], *, title: str = "") -> go.Figure:
    """KL against w at s = 16 and against s at w = 128, side by side on one axis, with KV4 as a line (Fig. 4c).

    Args: rows of `fidelity.csv` with metric `sampler_kl` and shape `4c`, of one model.
    """
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05)
    panels = ((0, 1, "recent tokens w, at s = 16"), (1, 0, "sink tokens s, at w = 128"))
    for column, (fixed, moving, label) in enumerate(panels, 1):
        pairs = [(widths(row["arm"]), row) for row in rows]
        chosen = sorted((pair[moving], row["arm"], row) for pair, row in pairs if pair and _at_default(pair, fixed))
        line = go.Scatter(
            x=[str(width) for width, _, _ in chosen],
            y=[float(row["value"]) for _, _, row in chosen],
            error_y=error_bars([row for _, _, row in chosen]),
            mode="lines+markers",
            line_color=PRECISION_COLOURS["kv4rl"],
            name=PRECISION_NAMES["kv4rl"],
            showlegend=column == 1,
        )
        figure.add_trace(line, row=1, col=column)
        figure.update_xaxes(title_text=label, type="category", row=1, col=column)
    for row in rows:
        if row["arm"] == "kv4":
            figure.add_hline(y=float(row["value"]), line={"color": PRECISION_COLOURS["kv4"], "dash": "dash"})
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title_text=KL_AXIS["title_text"], col=1)
    figure.update_layout(title=title, height=400, width=860)
    return figure


def _at_default(pair: tuple[int, int], index: int) -> bool:
    return pair[index] == DEFAULT_WIDTHS[index]


def pareto(points: Sequence[Point], *, title: str = "") -> go.Figure:
    """KL against stored bytes a position and KV head; the front is joined, the predicted speedup shows on hovering."""
    best = front(points)
    figure = go.Figure()
    for chosen, mode, colour, name in (
        ([p for p in points if p not in best], "markers", "#BBBBBB", "beaten in both"),
        (best, "lines+markers+text", PRECISION_COLOURS["kv4rl"], "front"),
    ):
        figure.add_scatter(
            x=[p.position_bytes for p in chosen],
            y=[p.kl for p in chosen],
            text=[p.arm for p in chosen],
            customdata=[p.predicted_speedup for p in chosen],
            hovertemplate="%{text}: %{y:.2e} nats, %{x:.0f} bytes, at most %{customdata:.2f}x BF16's decode speed",
            textposition="top right",
            mode=mode,
            marker_color=colour,
            name=name,
        )
    figure.update_xaxes(title_text="bytes a position and KV head, at head_dim 128 and 1,500 tokens")
    figure.update_yaxes(KL_AXIS)
    figure.update_layout(title=title, height=460, width=860)
    return figure
