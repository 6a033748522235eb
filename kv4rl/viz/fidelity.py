"""Fidelity figures: sampler KL and its interval by precision, arm, width and stored bytes (Fig. 4, A3, A4)."""

import math
import re
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.fidelity.pareto import Point, front
from kv4rl.paper import Published
from kv4rl.viz.style import ACCENT, PRECISION_COLOURS, PRECISION_NAMES

KL_AXIS = {"type": "log", "title_text": "sampler KL, nats (Eq. 5.2)", "exponentformat": "power", "dtick": 1}
WIDTHS = re.compile(r"kv4rl-s(\d+)-w(\d+)")
WIDTH = 720  # of figures of several panels: seven of them fit into a notebook of half a megabyte
DEFAULT_WIDTHS = (16, 128)
NAME_BYTES, NAME_DECADES = 12, 0.12  # what a name on the Pareto figure covers
ROOM_BYTES = 15  # what the longest name needs at the edge


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
            error_y=error_bars(chosen),
        )
    )
    figure.update_yaxes(KL_AXIS)
    labels = [f"{name}<br>{value:.2e}" for name, value in zip(figure.data[0].x, values, strict=True)]
    figure.update_xaxes(tickvals=list(figure.data[0].x), ticktext=labels)  # on the bars an interval would cross them
    figure.update_layout(title=title, height=380, width=560)
    return figure


def arm_dots(rows: Sequence[Mapping[str, str]], *, title: str = "") -> go.Figure:
    """One dot an arm in the rows' order, log axis, with intervals: Fig. 4b, A3a,c and A4.

    Dots, not bars: a logarithmic axis has no zero for a bar to start at.

    Args: rows of `fidelity.csv` with metric `sampler_kl`. Their panels (`shape`) stand below, their models beside
    one another, each under its own name and number of states; the last row of an arm counts.
    """
    cells = by_panel(rows)
    shapes, models = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    heights = [max(len(arms) for (name, _), arms in cells.items() if name == shape) for shape in shapes]
    titles = [_panel_title(shape, model, cells.get((shape, model), {})) for shape in shapes for model in models]
    plot_height = 26 * sum(heights) + 60 * (len(shapes) - 1)
    figure = make_subplots(
        rows=len(shapes), cols=len(models), row_heights=heights, subplot_titles=titles, shared_yaxes=True,
        horizontal_spacing=0.03, vertical_spacing=min(1, 60 / plot_height),
    )  # fmt: skip
    for (shape, model), arms in cells.items():
        place = {"row": shapes.index(shape) + 1, "col": models.index(model) + 1}
        figure.add_trace(_dots(list(arms.values())), **place)
        figure.update_xaxes(type="log", **_ticks(list(arms.values())), **place)
    figure.update_xaxes(title_text=KL_AXIS["title_text"], row=len(shapes))
    figure.update_yaxes(autorange="reversed")
    top = 70 if title else 30
    figure.update_layout(title=title, showlegend=False, width=WIDTH, margin={"l": 140, "t": top, "b": 55})
    figure.update_layout(height=plot_height + top + 55)
    return figure


def by_panel(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str], dict[str, Mapping[str, str]]]:
    """(panel, model) -> arm -> its last row, in the order of the rows."""
    cells = {}
    for row in rows:
        cells.setdefault((row["shape"], row["model"]), {})[row["arm"]] = row
    return cells


def _panel_title(shape: str, model: str, arms: Mapping[str, Mapping[str, str]]) -> str:
    states = ", ".join(dict.fromkeys(row["n"] for row in arms.values()))
    return f"{shape}: {model}, {states} states"


def _ticks(rows: Sequence[Mapping[str, str]]) -> dict:
    """An axis as wide as the intervals with at least two ticks: powers of ten, and 2 and 5 of them where few fit."""
    low, high = min(float(row["low"]) for row in rows) / 1.3, max(float(row["high"]) for row in rows) * 1.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    steps = (1,) if high / low > 300 else (1, 2, 5)
    ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
    text = [f"{tick:.0e}".replace("e-0", "e-") for tick in ticks]
    return {"range": [math.log10(low), math.log10(high)], "tickvals": ticks, "ticktext": text}


def _dots(rows: Sequence[Mapping[str, str]]) -> go.Scatter:
    """By arm downwards, because names of arms are long."""
    return go.Scatter(
        y=[PRECISION_NAMES.get(row["arm"], row["arm"]) for row in rows],
        x=[float(row["value"]) for row in rows],
        marker={"color": [PRECISION_COLOURS.get(row["arm"], ACCENT) for row in rows], "size": 9},
        error_x=error_bars(rows),
        mode="markers",
    )


def widths(arm: str) -> tuple[int, int] | None:
    """(s, w) of a `kv4rl` arm's name; None for any other arm."""
    if arm == "kv4rl":
        return DEFAULT_WIDTHS
    named = WIDTHS.fullmatch(arm)
    return (int(named[1]), int(named[2])) if named else None


def width_sweeps(
    rows: Sequence[Mapping[str, str]], *, published: Published | None = None, title: str = ""
) -> go.Figure:
    """KL against w at s = 16 and against s at w = 128, side by side on one axis, with KV4 as a line (Fig. 4c).

    Args: rows of `fidelity.csv` with metric `sampler_kl` and shape `4c`, of one model; `published`: the paper's ratio
    of KV4's KL to KV4-RL's at 16/128, drawn as a hollow marker that far below our KV4.
    """
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05)
    panels = ((0, 1, "recent tokens w, at s = 16"), (1, 0, "sink tokens s, at w = 128"))
    kv4 = next((float(row["value"]) for row in reversed(rows) if row["arm"] == "kv4"), None)
    for column, (fixed, moving, label) in enumerate(panels, 1):
        sweep = _sweep(rows, fixed, moving)
        traces = [sweep] if kv4 is None else [sweep, _level(sweep.x, kv4)]
        if kv4 is not None and published:
            traces.append(_papers(str(DEFAULT_WIDTHS[moving]), kv4, published))
        figure.add_traces([trace.update(showlegend=column == 1) for trace in traces], rows=1, cols=column)
        figure.update_xaxes(title_text=label, type="category", row=1, col=column)
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title_text=KL_AXIS["title_text"], col=1)
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    figure.update_layout(title=title, height=420, width=WIDTH, legend=legend, margin={"t": 90})
    return figure


def _sweep(rows: Sequence[Mapping[str, str]], fixed: int, moving: int) -> go.Scatter:
    """The arms with one width at the paper's, by the other."""
    pairs = [(widths(row["arm"]), row) for row in rows]
    chosen = sorted((pair[moving], row["arm"], row) for pair, row in pairs if pair and _at_default(pair, fixed))
    return go.Scatter(
        x=[str(width) for width, _, _ in chosen],
        y=[float(row["value"]) for _, _, row in chosen],
        error_y=error_bars([row for _, _, row in chosen]),
        mode="lines+markers",
        line_color=PRECISION_COLOURS["kv4rl"],
        name=PRECISION_NAMES["kv4rl"],
    )


def _level(x: Sequence[str], kv4: float) -> go.Scatter:
    line = {"color": PRECISION_COLOURS["kv4"], "dash": "dash"}
    return go.Scatter(x=[x[0], x[-1]], y=[kv4, kv4], mode="lines", line=line, name=PRECISION_NAMES["kv4"])


def _papers(width: str, kv4: float, published: Published) -> go.Scatter:
    """A hollow marker where the paper's ratio puts 16/128 below our KV4."""
    return go.Scatter(
        x=[width],
        y=[kv4 / published.value],
        mode="markers",
        marker={"symbol": "circle-open", "size": 13, "color": "#222222", "line": {"width": 2}},
        name=f"the paper's {published.value:g}x below KV4 at 16/128 ({published.locator})",
    )


def _at_default(pair: tuple[int, int], index: int) -> bool:
    return pair[index] == DEFAULT_WIDTHS[index]


def pareto(points: Sequence[Point], *, title: str = "") -> go.Figure:
    """KL against stored bytes a position and KV head; the front is joined and named, KV4-RL by its s/w.

    The predicted speedup shows on hovering.
    """
    best = front(points)
    figure = go.Figure()
    for chosen, mode, colour, name in (
        ([p for p in points if p not in best], "markers", "#BBBBBB", "beaten in both"),
        (best, "lines+markers+text", PRECISION_COLOURS["kv4rl"], "front"),
    ):
        figure.add_scatter(
            x=[p.position_bytes for p in chosen],
            y=[p.kl for p in chosen],
            text=_spaced_names(chosen),
            customdata=[(p.predicted_speedup, short_name(p.arm)) for p in chosen],
            textfont_size=11,
            hovertemplate="%{customdata[1]}: %{y:.2e} nats, %{x:.0f} bytes, at most %{customdata[0]:.2f}x BF16's speed",
            textposition="bottom left",
            mode=mode,
            marker_color=colour,
            name=name,
        )
    sizes = [point.position_bytes for point in points]
    around = [min(sizes) - ROOM_BYTES, max(sizes) + ROOM_BYTES / 2]  # names stand to the left of their points
    figure.update_xaxes(title_text="bytes a position and KV head, at head_dim 128 and 1,500 tokens", range=around)
    figure.update_yaxes(KL_AXIS)
    legend = {"x": 0.98, "xanchor": "right", "y": 0.98}
    figure.update_layout(title=title, height=440, width=WIDTH, legend=legend, margin={"t": 60 if title else 20})
    return figure


def _spaced_names(points: Sequence[Point]) -> list[str]:
    """Short names, empty where one would lie on another's; the paper's widths have theirs first."""
    names = {}
    for point in sorted(points, key=lambda point: widths(point.arm) != DEFAULT_WIDTHS):
        if all(
            abs(point.position_bytes - other.position_bytes) > NAME_BYTES
            or abs(math.log10(point.kl / other.kl)) > NAME_DECADES
            for other in names
        ):
            names[point] = short_name(point.arm)
    return [names.get(point, "") for point in points]


def short_name(arm: str) -> str:
    """`s/w` for a width of `kv4rl`, any other arm's own name."""
    pair = widths(arm)
    return f"{pair[0]}/{pair[1]}" if pair else PRECISION_NAMES.get(arm, arm)
