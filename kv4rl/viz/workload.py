"""Rollout traces drawn, measured or simulated: Figs. 2, 3a and A1."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.config import require
from kv4rl.rollout.trace import Trace
from kv4rl.viz.style import ACCENT

SYNC, ASYNC = "#555555", "#009E73"
MARGIN = {"t": 40, "b": 60}
ARMS = {"sync": ("synchronous", SYNC), "partial": ("partial", ASYNC)}


def smoothed(values: np.ndarray, window: int = 65, stride: int = 8) -> np.ndarray:
    """Centred means over at most `window` calls, every `stride` calls, as Fig. 2 is drawn (§B.3)."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    middle = np.arange(0, len(values), stride)
    low, high = np.maximum(middle - window // 2, 0), np.minimum(middle + window // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def concentration_trace(
    traces: Mapping[str, Trace], kv_bytes_per_token: float, *, replica: int, collections: Sequence[int], calls: int
) -> go.Figure:
    """Fig. 2: active batch, mean context, resident KV and step latency over the decode calls of one replica.

    Batch and context sums are smoothed together, so that their product stays the volume shown; dashed: means over
    every call of all replicas in `collections`.
    """
    titles = ("active requests B_t", "mean context, tokens", "nominal resident KV, GB", "decode step, ms")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=0.16)
    for arm, trace in traces.items():
        name, colour = ARMS[arm]
        rows = trace.pure_decode()
        measured = np.isin(rows["collection"], list(collections))
        shown = measured & (rows["replica"] == replica)
        cut = {key: rows[key][shown][:calls] for key in ("active_requests", "context_tokens", "step_ms")}
        active, context, step = (smoothed(values) for values in cut.values())
        curves = (active, context / active, context * kv_bytes_per_token / 1e9, step)
        means = [rows[key][measured].mean() for key in cut]
        levels = (means[0], None, means[1] * kv_bytes_per_token / 1e9, means[2])
        for panel, (curve, level) in enumerate(zip(curves, levels, strict=True)):
            place = {"row": panel // 2 + 1, "col": panel % 2 + 1}
            line = go.Scatter(x=8 * np.arange(len(curve)), y=curve, name=name, line={"color": colour, "width": 2})
            line.update(legendgroup=arm, showlegend=panel == 0)
            figure.add_trace(line, **place)
            if level is not None:
                figure.add_hline(y=level, line={"color": colour, "dash": "dash", "width": 1}, **place)
    figure.update_xaxes(title_text="decode call", row=2)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(height=420, width=720, margin=MARGIN)
    return figure


def measured_traces(rows: Sequence[Mapping[str, str]]) -> go.Figure:
    """Fig. 2 on a real engine: the same four curves over an interval's decode calls, from `rollout_trace.csv`.

    A point is the mean of one bin of calls (`bench/trace_bins.py`); contexts are those of an active request. Rows: one
    model and fit, one interval; raises `ValueError` for more, whose curves would be joined.
    """
    runs = {(row["model"], row["shape"].rsplit("/", 1)[0]) for row in rows}
    require(len(runs) <= 1, "rows", sorted(runs), "one model, fit and interval")
    panels = {
        "active requests": ("active_requests", 1), "context, tokens": ("context_tokens", 1),
        "resident KV, GB": ("resident_kv_bytes", 1e-9), "decode step, ms": ("decode_step_ms", 1),
    }  # fmt: skip
    figure = make_subplots(rows=1, cols=4, subplot_titles=tuple(panels), horizontal_spacing=0.06)
    for arm, (name, colour) in ARMS.items():
        for column, (metric, scale) in enumerate(panels.values(), 1):
            bins = [row for row in rows if (row["arm"], row["metric"]) == (arm, metric)]
            bins.sort(key=itemgetter("shape"))
            last = np.cumsum([float(row["n"]) for row in bins])
            line = go.Scatter(x=last, y=[scale * float(row["value"]) for row in bins], name=name, legendgroup=arm)
            line.update(line={"color": colour, "width": 2}, showlegend=column == 1)
            figure.add_trace(line, row=1, col=column)
    figure.update_xaxes(nticks=4).update_yaxes(rangemode="tozero")
    below = {"orientation": "h", "y": -0.25, "x": 0.5, "xanchor": "center", "title": "over decode calls:"}
    return figure.update_layout(height=230, width=780, margin=MARGIN, legend=below)


def carried_and_fresh(
    trace: Trace, kv_bytes_per_token: float, *, replica: int, collections: Sequence[int]
) -> go.Figure:
    """Resident KV of one replica, split into work carried over an update and fresh work (§B.3)."""
    rows = trace.pure_decode()
    shown = np.isin(rows["collection"], list(collections)) & (rows["replica"] == replica)
    figure = go.Figure()
    for name, colour in (("carried", ACCENT), ("fresh", ASYNC)):
        volume = smoothed(rows[f"{name}_context_tokens"][shown]) * kv_bytes_per_token / 1e9
        line = {"width": 0.5, "color": colour}
        figure.add_scatter(x=8 * np.arange(len(volume)), y=volume, name=name, stackgroup="volume", line=line)
    for boundary in np.flatnonzero(np.diff(rows["collection"][shown])) + 1:
        figure.add_vline(x=int(boundary), line={"color": "#BBBBBB", "width": 1})
    figure.update_xaxes(title_text="decode call (grey lines: policy updates)")
    figure.update_yaxes(title_text="nominal resident KV, GB")
    figure.update_layout(height=290, width=720, margin=MARGIN)
    return figure


def service_demands(states: Mapping[str, object]) -> go.Figure:
    """Fig. 3a: idealised milliseconds of weights, compute and KV, a group of bars for each named `Demands`."""
    figure = go.Figure()
    parts = (("weights", "weights / bandwidth", "#0072B2"), ("compute", "linear FLOPs / rate", "#E69F00"))
    for name, label, colour in (*parts, ("kv", "KV / bandwidth", "#D55E00")):
        values = [getattr(found, f"{name}_ms") for found in states.values()]
        figure.add_bar(x=list(states), y=values, name=label, marker_color=colour)
    figure.update_yaxes(title_text="idealised service time, ms")
    figure.update_layout(barmode="group", height=310, width=720, margin=MARGIN)
    return figure


def ratios(table: Mapping[str, Mapping[str, float]], published: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Fig. A1: partial over synchronous, one group of bars a checkpoint; the paper's points as hollow diamonds."""
    colours = {"active batch": "#0072B2", "resident KV": "#D55E00", "step latency": "#CC79A7", "throughput": "#009E73"}
    figure = go.Figure()
    for offset, (name, colour) in enumerate(colours.items()):
        position = np.arange(len(table)) + 0.2 * (offset - 1.5)
        values = [row[name] for row in table.values()]
        figure.add_bar(x=position, y=values, width=0.18, name=name, marker_color=colour)
        paper = [published.get(checkpoint, {}).get(name) for checkpoint in table]
        marker = {"symbol": "diamond-open", "size": 12, "color": "black", "line": {"width": 2}}
        shown = {"name": "paper", "legendgroup": "paper", "showlegend": offset == 0}
        figure.add_scatter(x=position, y=paper, mode="markers", marker=marker, **shown)
    figure.add_hline(y=1, line={"dash": "dash", "color": "#888888"})
    figure.update_xaxes(tickvals=list(range(len(table))), ticktext=list(table))
    figure.update_yaxes(title_text="partial / synchronous", rangemode="tozero")
    figure.update_layout(height=320, width=720, margin=MARGIN)
    return figure
