"""Sink and recent widths drawn: KL by width, KL against speed, and which positions of a growing response are INT8."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.config import KVConfig
from kv4rl.viz.cache import REGION_COLOURS, region_codes
from kv4rl.viz.protection_grid import Grid, Point, Workload, response_bytes
from kv4rl.viz.style import ACCENT, PRECISION_COLOURS

CHOSEN, OTHERS = PRECISION_COLOURS["kv4rl"], "#BBBBBB"
BEYOND, WHITE = 3, "#FFFFFF"  # the map's code for positions not reached: a number, since widgets carry no NaN
MAP_ROWS, MAP_COLUMNS = 96, 384  # cells of the map: what a screen shows, and a move stays one small message
KL_AXIS = {"type": "log", "exponentformat": "power", "dtick": 1}


def tradeoff(grid: Grid, workload: Workload, sink: int, recent: int) -> go.Figure:
    """One pair of widths among all of the grid, in three panels whose titles carry its numbers.

    Left: KL by recent width, a line a sink width, intervals on the chosen one. Right: every pair's KL against
    attention speed at the workload. Below: the regions of one response of the workload, from its first token on.
    """
    point, speed = grid.at(sink, recent), workload.speed(sink, recent)
    titles = (
        f"KL {number(point.kl)} nats [{number(point.low)}, {number(point.high)}]",
        f"attention {speed.over_bf16:.2f}x BF16 ({speed.scope}), "
        f"step {workload.step_speed(sink, recent):.2f}x predicted",
        _map_title(workload.context_tokens, sink, recent),
    )
    layout = {"specs": [[{}, {}], [{"colspan": 2}, None]], "row_heights": [0.62, 0.38], "vertical_spacing": 0.2}
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.09, **layout)
    _add_kl_by_width(figure, grid, point)
    _add_kl_against_speed(figure, grid, workload, point)
    figure.add_trace(_map(workload.context_tokens, sink, recent), row=2, col=1)
    figure.update_xaxes(title_text="position", range=[0, workload.context_tokens], row=2, col=1)
    figure.update_yaxes(title_text="context tokens", range=[workload.context_tokens, 0], row=2, col=1)
    figure.update_annotations(font_size=13)
    figure.update_layout(height=640, width=920, margin={"t": 50, "b": 55, "r": 45}, showlegend=False)
    return figure


def number(value: float) -> str:
    """Two digits and a power of ten."""
    return f"{value:.1e}".replace("e-0", "e-")


def _map_title(context: int, sink: int, recent: int) -> str:
    ours, bf16 = (response_bytes(context, kv) for kv in (KVConfig("kv4rl", sink, recent), KVConfig("bf16")))
    words = {"sink": f"sink, INT8 ({sink})", "main": "main, INT4", "recent": f"recent, INT8 ({recent})"}
    legend = "  ".join(f"<span style='color:{REGION_COLOURS[name]}'>\u25a0 {words[name]}</span>" for name in words)
    return f"{context:,} tokens: {ours / 1e6:.1f} MB of Qwen3 cache, BF16 {bf16 / 1e6:.1f} MB   {legend}"


def _add_kl_by_width(figure: go.Figure, grid: Grid, chosen: Point) -> None:
    names = [str(recent) for recent in grid.recents]
    for sink in grid.sinks:
        y = [grid.at(sink, recent).kl for recent in grid.recents]
        label = [""] * (len(names) - 1) + ["s = 0" if sink == 0 else ""]
        line = {"line": {"color": OTHERS, "width": 1.5}, "mode": "lines+text", "textposition": "top center"}
        figure.add_trace(go.Scatter(x=names, y=y, text=label, name=f"s = {sink}", **line), row=1, col=1)
    points = [grid.at(chosen.sink, recent) for recent in grid.recents]
    bars = {
        "type": "data", "symmetric": False, "thickness": 1.5, "array": [point.high - point.kl for point in points],
        "arrayminus": [point.kl - point.low for point in points],
    }  # fmt: skip
    y, line = [point.kl for point in points], {"color": CHOSEN, "width": 3}
    name = f"s = {chosen.sink}, 95 % intervals"
    figure.add_trace(go.Scatter(x=names, y=y, error_y=bars, mode="lines", line=line, name=name), row=1, col=1)
    figure.add_trace(_marker(str(chosen.recent), chosen), row=1, col=1)
    figure.update_xaxes(
        title_text=f"recent width w; green: s = {chosen.sink}, grey: other s", type="category", row=1, col=1
    )
    figure.update_yaxes(title_text="sampler KL, nats (Eq. 5.2)", **KL_AXIS, row=1, col=1)


def _add_kl_against_speed(figure: go.Figure, grid: Grid, workload: Workload, chosen: Point) -> None:
    points = list(grid.points.values())
    speeds = [workload.speed(point.sink, point.recent) for point in points]
    measured = [speed.scope == "measured" for speed in speeds]
    text = [f"s = {p.sink}, w = {p.recent}: {speed.scope}" for p, speed in zip(points, speeds, strict=True)]
    looks = [(ACCENT, 12, "diamond") if known else (OTHERS, 7, "circle") for known in measured]
    marker = dict(zip(("color", "size", "symbol"), map(list, zip(*looks, strict=True)), strict=True))
    x, y = [speed.over_bf16 for speed in speeds], [point.kl for point in points]
    figure.add_trace(go.Scatter(x=x, y=y, text=text, mode="markers", marker=marker), row=1, col=2)
    front = grid.front()
    x = [workload.speed(point.sink, point.recent).over_bf16 for point in front]
    line = {"color": "#555555", "width": 1, "dash": "dot"}
    figure.add_trace(go.Scatter(x=x, y=[p.kl for p in front], mode="lines", line=line, name="front"), row=1, col=2)
    here = workload.speed(chosen.sink, chosen.recent).over_bf16
    figure.add_trace(_marker(here, chosen), row=1, col=2)
    figure.update_xaxes(title_text="attention over BF16 (diamonds: measured)", row=1, col=2)
    figure.update_yaxes(**KL_AXIS, row=1, col=2)


def _marker(x: float | str, point: Point) -> go.Scatter:
    marker = {"size": 15, "color": CHOSEN, "line": {"color": "white", "width": 2}}
    return go.Scatter(x=[x], y=[point.kl], mode="markers", marker=marker, name="chosen")


def _map(context: int, sink: int, recent: int) -> go.Heatmap:
    contexts = np.linspace(1, context, MAP_ROWS).astype(int)
    positions = np.linspace(0, context - 1, min(MAP_COLUMNS, context)).astype(int)
    codes = np.nan_to_num(region_codes(contexts, sink, recent)[:, positions], nan=BEYOND).astype(np.uint8)
    colours = (*REGION_COLOURS.values(), WHITE)
    scale = [(edge, colour) for k, colour in enumerate(colours) for edge in (k / 4, (k + 1) / 4)]
    shown = {"zmin": -0.5, "zmax": 3.5, "colorscale": scale, "showscale": False, "hoverinfo": "x+y"}
    return go.Heatmap(z=codes, x=positions, y=contexts, **shown)
