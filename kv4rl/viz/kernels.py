"""Figures of the kernels: who reads which code of a page, and speed as the stored rows tell it."""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.bench.kernels import BASELINE
from kv4rl.config import PRECISIONS
from kv4rl.formats.packing import k4_index, v4_index
from kv4rl.paper import REPLAY_SHAPES
from kv4rl.theory.roofline import H200_BANDWIDTH
from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES

# Bytes of BF16 over bytes of the format, per position at head_dim 128: what no kernel bound by memory can exceed.
BYTE_LIMITS = {"kv8": 512 / 260, "kv4": 512 / 136}


TABLE_A3 = {f"{batch}x{context}" for shapes in REPLAY_SHAPES.values() for batch, context in shapes}
SMALL_BATCH = 64  # requests: below Table A3's batches


SPEEDUP_ARMS = {arm: PRECISION_NAMES[arm] for arm in PRECISIONS[1:]} | {"kv4_p8": "KV4, 8-bit P", "bf16": "our BF16"}


def is_shape(row: Mapping[str, str]) -> bool:
    """Whether a row is of one `BxL`, not of mixed contexts."""
    return re.fullmatch(r"\d+x\d+", row["shape"]) is not None


def of_table_a3(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """The rows whose shape Table A3 has."""
    return [row for row in rows if row["shape"] in TABLE_A3]


def times(speedup: float | None) -> str:
    """A speedup as tables show it."""
    return "-" if speedup is None else f"{speedup:.2f}x"


def speedup_table(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """A line a shape: FlashInfer's microseconds and each format's speedup; Table A3's shapes, small batches, mixed.

    Args: rows of `kernels.csv` of one model's heads; other metrics are passed over.
    """
    value = {(row["shape"], row["arm"], row["metric"]): float(row["value"]) for row in rows}
    shapes = {shape for shape, _, metric in value if metric == "speedup_vs_bf16"}
    return [
        {"batch x context": shape, "BF16 FlashInfer": f"{value[shape, BASELINE, 'ms_per_layer'] * 1e3:.1f} us"}
        | {name: times(value.get((shape, arm, "speedup_vs_bf16"))) for arm, name in SPEEDUP_ARMS.items()}
        for shape in sorted(shapes, key=_place)
    ]


def _place(shape: str) -> tuple[int, int, str]:
    """Order of a shape in a table: its kind, then its context."""
    batch, _, context = shape.partition("x")
    return (2, 0, shape) if not context.isdigit() else (int(shape not in TABLE_A3), int(context), batch.zfill(4))


def write_times(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """What `write_kv` of q, k and v takes, a sentence's part a format: microseconds by tokens."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row["metric"] == "write_kv_us":
            said.setdefault(row["arm"], []).append(f"{float(row['value']):.1f} us for {row['shape']} tokens")
    return [f"{PRECISION_NAMES[arm]} {', '.join(said[arm])}" for arm in PRECISIONS if arm in said]


def roofline(rows: Sequence[Mapping[str, str]], *, flops_per_s: float, query_heads: int, head_dim: int) -> go.Figure:
    """Decode attention under the card's two roofs: operations a second against operations a byte, a dot a shape.

    Args: rows of `kernels.csv` with metrics `ms_per_layer`, `kv_bytes_per_s` and `share_of_copy_rate`, of one model's
    heads; `flops_per_s`: the measured dense BF16 rate. The memory's roof is the copy rate that the rows are shares of.
    """
    value = {(row["arm"], row["shape"], row["metric"]): float(row["value"]) for row in rows if is_shape(row)}
    figure, copy_rate = go.Figure(), 0.0
    for arm in (BASELINE, *PRECISIONS[1:]):
        points = []
        for shape in sorted({shape for found, shape, _ in value if found == arm}, key=_place):
            ms, rate = value[arm, shape, "ms_per_layer"], value[arm, shape, "kv_bytes_per_s"]
            batch, context = map(int, shape.split("x"))
            operations = 4 * head_dim * query_heads * batch * context  # a multiply and an add, in Q K and in P V
            points.append((operations / (rate * ms * 1e-3), operations / (ms * 1e-3) / 1e12, shape))
            copy_rate = rate / value[arm, shape, "share_of_copy_rate"]
        x, y, text = zip(*points, strict=True) if points else ((), (), ())
        figure.add_scatter(x=x, y=y, text=text, mode="markers", **_named(arm))
    ridge = flops_per_s / copy_rate
    roofs = {"x": [1, ridge, 4 * ridge], "y": [copy_rate / 1e12, flops_per_s / 1e12, flops_per_s / 1e12]}
    figure.add_scatter(**roofs, mode="lines", line={"color": "#555555"}, name=f"roofs: {copy_rate / 1e12:.2f} TB/s, "
                       f"{flops_per_s / 1e12:.0f} TFLOP/s; ridge at {ridge:.0f}")  # fmt: skip
    figure.update_xaxes(title_text="operations a KV byte", type="log").update_yaxes(title_text="TFLOP/s", type="log")
    return figure.update_layout(height=380, width=820)


def _named(arm: str) -> dict:
    """Name and colour of an arm's dots."""
    precision = arm.split("_")[0]
    name = PRECISION_NAMES[precision] + (", FlashInfer" if arm == BASELINE else "")
    return {"name": name, "marker": {"color": PRECISION_COLOURS[precision]}}


def kernel_speedups(rows: Sequence[Mapping[str, str]]) -> go.Figure:
    """Grouped bars over shapes `BxL`, by context length; dashed lines are the limits that bytes alone allow.

    Args: rows of `kernels.csv` with metric `speedup_vs_bf16`, of one model's heads.
    """
    shapes = sorted({row["shape"] for row in rows if is_shape(row)}, key=lambda shape: int(shape.split("x")[1]))
    figure = go.Figure()
    for precision in PRECISIONS[1:]:
        values = {row["shape"]: float(row["value"]) for row in rows if row["arm"] == precision}
        figure.add_bar(
            x=[shape.replace("x", " x ") for shape in shapes], y=[values.get(shape) for shape in shapes],
            name=PRECISION_NAMES[precision], marker_color=PRECISION_COLOURS[precision],
        )  # fmt: skip
    for precision, limit in BYTE_LIMITS.items():
        figure.add_hline(y=limit, line={"color": PRECISION_COLOURS[precision], "dash": "dash", "width": 1})
        text = f"{PRECISION_NAMES[precision]} bytes:<br>{limit:.2f}x"
        beside = {"x": 1.01, "xref": "paper", "xanchor": "left", "showarrow": False}  # on the plot bars would cover it
        figure.add_annotation(y=limit, text=text, align="left", **beside)
    title = {"text": "active requests x context tokens (Table A3), one TP2 shard, per layer", "standoff": 12}
    figure.update_xaxes(title=title, type="category", tickangle=-60, automargin=True, tickfont={"size": 11})
    figure.update_yaxes(title_text="speedup over FlashInfer BF16", rangemode="tozero")
    figure.update_layout(
        barmode="group", bargap=0.15, height=460, width=980, margin={"r": 100, "b": 120},
        legend={"orientation": "h", "y": 1.1},
    )  # fmt: skip
    return figure


LANE_BYTES, LANES = 16, 32  # of one load of a warp: 512 bytes


def fragment_lanes(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The warp lane that loads each INT4 code of a page: two int arrays [16 tokens, head_dim], for keys and values."""
    indices = (index(head_dim)[0].numpy() for index in (k4_index, v4_index))
    keys, values = (index // LANE_BYTES % LANES for index in indices)
    return keys, values


def fragment_map(head_dim: int) -> go.Figure:
    """`fragment_lanes` as two heat maps, token against channel."""
    titles = ("K codes: m16n8k32, tokens are rows", "V codes: m16n8k16, channels are rows")
    figure = make_subplots(rows=2, cols=1, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.12)
    for row, lanes in enumerate(fragment_lanes(head_dim), start=1):
        shown = {"showscale": row == 1, "colorbar": {"title": "lane"}}
        figure.add_trace(go.Heatmap(z=lanes, zmin=0, zmax=LANES - 1, colorscale="Turbo", **shown), row=row, col=1)
        figure.update_yaxes(title_text="token of the page", autorange="reversed", row=row, col=1)
    figure.update_xaxes(title_text="channel", row=2, col=1)
    figure.update_layout(height=460, width=900)
    return figure


def achieved_rates(rows: Sequence[Mapping[str, str]]) -> go.Figure:
    """KV bytes read a second against context length, a dot a shape; dashed: the vendor's peak.

    Args: rows of `kernels.csv` with metric `kv_bytes_per_s`, of one model's heads.
    """
    figure = go.Figure()
    for arm in (BASELINE, *PRECISIONS[1:]):
        found = [
            (int(r["shape"].split("x")[1]), float(r["value"]) / 1e12) for r in rows if r["arm"] == arm and is_shape(r)
        ]
        x, y = zip(*sorted(found), strict=True) if found else ((), ())
        figure.add_scatter(x=x, y=y, mode="markers", **_named(arm))
    peak = H200_BANDWIDTH / 1e12
    figure.add_hline(y=peak, line={"dash": "dash", "width": 1}, annotation_text=f"vendor peak {peak:.1f} TB/s")
    figure.update_xaxes(
        title_text="context tokens", type="log", tickvals=[500, 1000, 2000, 4000, 8000], tickformat=",d"
    )
    figure.update_yaxes(title_text="KV bytes read, TB/s", rangemode="tozero")
    figure.update_layout(height=400, width=820)
    return figure


def schedule_bars(shares: Mapping[str, float]) -> go.Figure:
    """The share of a launch in which its blocks have work, one bar a schedule."""
    text = [f"{share:.0%}" for share in shares.values()]
    figure = go.Figure(go.Bar(y=list(shares), x=list(shares.values()), orientation="h", text=text))
    figure.update_xaxes(title_text="share of the launch with work for every block", range=[0, 1.05], tickformat=".0%")
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(height=280, width=820, margin={"l": 240})
    return figure
