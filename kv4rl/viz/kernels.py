"""Kernel speed as stored rows tell it: each precision's speedup over the BF16 baseline, shape by shape."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kv4rl.config import PRECISIONS
from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES

# Bytes of BF16 over bytes of the format, per position at head_dim 128: what no kernel bound by memory can exceed.
BYTE_LIMITS = {"kv8": 512 / 260, "kv4": 512 / 136}


def kernel_speedups(rows: Sequence[Mapping[str, str]]) -> go.Figure:
    """Grouped bars over shapes `BxL`, by context length; dashed lines are the limits that bytes alone allow.

    Args: rows of `kernels.csv` with metric `speedup_vs_bf16`, of one model's heads.
    """
    shapes = sorted({row["shape"] for row in rows if "x" in row["shape"]}, key=lambda shape: int(shape.split("x")[1]))
    figure = go.Figure()
    for precision in PRECISIONS[1:]:
        values = {row["shape"]: float(row["value"]) for row in rows if row["arm"] == precision}
        figure.add_bar(
            x=[shape.replace("x", " x ") for shape in shapes], y=[values.get(shape) for shape in shapes],
            name=PRECISION_NAMES[precision], marker_color=PRECISION_COLOURS[precision],
        )  # fmt: skip
    for precision, limit in BYTE_LIMITS.items():
        line = {"color": PRECISION_COLOURS[precision], "dash": "dash", "width": 1}
        text = f"{PRECISION_NAMES[precision]} bytes: {limit:.2f}x"
        figure.add_hline(y=limit, line=line, annotation_text=text, annotation_position="top right")
    figure.update_xaxes(
        title_text="active requests x context tokens (Table A3), one TP2 shard, per layer", type="category"
    )
    figure.update_yaxes(title_text="speedup over FlashInfer BF16", rangemode="tozero")
    figure.update_layout(barmode="group", height=420, width=980, legend={"orientation": "h", "y": 1.12})
    return figure
