"""Figures of the cache: a page's bytes, the three regions of a growing context, and the side buffer's ring (§5.2)."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.attention.regions import regions
from kv4rl.viz.style import ACCENT, PRECISION_COLOURS

REGION_COLOURS = {"sink": ACCENT, "main": PRECISION_COLOURS["kv4"], "recent": PRECISION_COLOURS["kv4rl"]}
ROW_BYTES = 64  # of a page's drawing: one line of memory a GPU fetches is 128 bytes, half of it a row


def region_codes(contexts: Sequence[int], s: int, w: int) -> np.ndarray:
    """0 sink, 1 main, 2 recent for every position of every context, NaN beyond it: [contexts, longest]."""
    codes = np.full((len(contexts), max(contexts)), np.nan)
    for row, context in enumerate(contexts):
        for code, (start, stop) in enumerate(regions(context, s, w)):
            codes[row, start:stop] = code
    return codes


def region_map(contexts: Sequence[int], s: int, w: int) -> go.Figure:
    """Which representation attention reads, by position (x) and context length (y)."""
    colours = list(REGION_COLOURS.values())
    scale = [(edge, colours[k]) for k in range(3) for edge in (k / 3, (k + 1) / 3)]
    heat = go.Heatmap(
        z=region_codes(contexts, s, w), y=list(contexts), zmin=-0.5, zmax=2.5, colorscale=scale,
        colorbar={"tickvals": [0, 1, 2], "ticktext": [f"sink, INT8 ({s})", "main, INT4", f"recent, INT8 ({w})"]},
    )  # fmt: skip
    figure = go.Figure(heat)
    figure.update_xaxes(title_text="position")
    figure.update_yaxes(title_text="context tokens", autorange="reversed")
    figure.update_layout(height=400, width=820)
    return figure


def ring_contents(held: np.ndarray, s: int) -> go.Figure:
    """The position each side-buffer entry holds after each token: held [steps, s + w], -1 while empty."""
    shown = np.where(held < 0, np.nan, held)
    heat = go.Heatmap(z=shown.T, x=np.arange(1, len(held) + 1), colorscale="Viridis", colorbar={"title": "position"})
    figure = go.Figure(heat)
    figure.add_hline(y=s - 0.5, line={"color": "white", "width": 2})
    figure.update_xaxes(title_text="context tokens")
    figure.update_yaxes(title_text="side-buffer entry (sink below the line)")
    figure.update_layout(height=400, width=820)
    return figure


def byte_owners(snapshots: np.ndarray) -> np.ndarray:
    """Which token's write changed each byte last: snapshots uint8 [tokens + 1, bytes] -> int [bytes], -1 for none."""
    changed = snapshots[1:] != snapshots[:-1]
    last = len(changed) - 1 - changed[::-1].argmax(0)
    return np.where(changed.any(0), last, -1)


def page_fill(snapshots: np.ndarray, stages: Sequence[int]) -> go.Figure:
    """One page's bytes in rows of 64, coloured by the token that wrote them, after each of `stages` tokens."""
    titles = [f"{stage} token{'s' * (stage > 1)}" for stage in stages]
    figure = make_subplots(rows=1, cols=len(stages), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.02)
    for column, stage in enumerate(stages, 1):
        owners = byte_owners(snapshots[: stage + 1]).astype(float)
        owners[owners < 0] = np.nan
        heat = go.Heatmap(
            z=owners.reshape(-1, ROW_BYTES), zmin=0, zmax=len(snapshots) - 2, colorscale="Turbo",
            showscale=column == len(stages), colorbar={"title": "token"},
        )  # fmt: skip
        figure.add_trace(heat, row=1, col=column)
        figure.update_xaxes(title_text="byte", row=1, col=column)
    figure.update_yaxes(title_text=f"row of {ROW_BYTES} bytes", autorange="reversed", row=1, col=1)
    figure.update_layout(height=440, width=900)
    return figure
