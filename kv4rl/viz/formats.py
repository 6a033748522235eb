"""Figures of storage formats: what rotation does to a key, and error against bits (§D.4, Fig. A4)."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.viz.style import ACCENT, PRECISION_COLOURS

FORMAT_NAMES = {
    "int4": "INT4", "int4_g64": "INT4/64", "int4_g32": "INT4/32", "int4_g16": "INT4/16",
    "nvfp4": "NVFP4", "mxfp4": "MXFP4", "int8": "INT8",
}  # fmt: skip
ROTATION_COLOURS = {False: PRECISION_COLOURS["kv4"], True: PRECISION_COLOURS["kv4rl"]}
ROTATION_NAMES = {False: "as it is", True: "rotated"}


def channel_magnitudes(panels: Mapping[str, np.ndarray]) -> go.Figure:
    """|x| by token and channel, one heat map a panel on one colour scale: name -> [tokens, channels]."""
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels), horizontal_spacing=0.06)
    top = max(float(np.abs(x).max()) for x in panels.values())
    for column, x in enumerate(panels.values(), 1):
        heat = go.Heatmap(z=np.abs(x).T, zmin=0, zmax=top, colorscale="Viridis", showscale=column == len(panels))
        heat.update(colorbar={"title": "|x|"})
        figure.add_trace(heat, row=1, col=column)
        figure.update_xaxes(title_text="token", row=1, col=column)
    figure.update_yaxes(title_text="channel", row=1, col=1)
    figure.update_layout(height=400, width=900)
    return figure


def rotation_bars(rows: Sequence[Mapping]) -> go.Figure:
    """Relative error with and without rotation: rows with `tensor`, `format`, `rotated`, `error`; a panel a tensor."""
    tensors = list(dict.fromkeys(row["tensor"] for row in rows))
    figure = make_subplots(rows=1, cols=len(tensors), subplot_titles=tensors, shared_yaxes=True)
    for column, tensor in enumerate(tensors, 1):
        for rotated in (False, True):
            chosen = [row for row in rows if row["tensor"] == tensor and row["rotated"] == rotated]
            bar = go.Bar(
                x=[FORMAT_NAMES[row["format"]] for row in chosen],
                y=[row["error"] for row in chosen],
                name=ROTATION_NAMES[rotated],
                marker_color=ROTATION_COLOURS[rotated],
                legendgroup=str(rotated),
                showlegend=column == 1,
            )
            figure.add_trace(bar, row=1, col=column)
    figure.update_yaxes(title_text="RMS error / RMS value", row=1, col=1)
    figure.update_layout(height=420, width=900, barmode="group", legend={"orientation": "h", "y": 1.2})
    return figure


def error_against_bits(rows: Sequence[Mapping]) -> go.Figure:
    """Relative error against stored bits per element, a line through the INT4 groups (INT4/32: groups of 32).

    rows with `format`, `bits`, `error` and `rotated`; each format is named once, where its points do not collide.
    """
    figure = go.Figure()
    kinds = {"INT4": ("circle", PRECISION_COLOURS["kv4"]), "FP4": ("diamond", ACCENT)}
    for kind, (symbol, colour) in kinds.items():
        for rotated in (False, True):
            chosen = [r for r in rows if r["format"].startswith("int4") == (kind == "INT4") and r["rotated"] == rotated]
            chosen.sort(key=lambda row: row["bits"])
            figure.add_scatter(
                x=[row["bits"] for row in chosen],
                y=[row["error"] for row in chosen],
                text=[FORMAT_NAMES[row["format"]] for row in chosen],
                textposition="bottom center" if kind == "INT4" else "middle right",
                mode=("lines+" if kind == "INT4" else "")
                + "markers"
                + ("+text" if rotated == (kind == "INT4") else ""),
                name=f"{kind}, {ROTATION_NAMES[rotated]}",
                marker={"symbol": symbol if rotated else f"{symbol}-open", "size": 11, "color": colour},
                line={"dash": "solid" if rotated else "dot", "color": colour},
            )
    figure.update_xaxes(title_text="bits per element, metadata included", range=[4.0, 6.4])
    figure.update_yaxes(title_text="RMS error / RMS value", rangemode="tozero")
    figure.update_layout(height=430, width=820)
    return figure
