"""Figures of regional attention: how exact a merge is, where the softmax mass lies, what each cache costs (Eq. A1)."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from kv4rl.viz.cache import REGION_COLOURS
from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES

LINE_COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7")


def merge_error(rows: Sequence[Mapping]) -> go.Figure:
    """Relative error against the number of regions, a line a `name`: rows with `name`, `regions`, `error`; log-log."""
    figure = go.Figure()
    for name, colour in zip(dict.fromkeys(row["name"] for row in rows), LINE_COLOURS, strict=False):
        chosen = [row for row in rows if row["name"] == name]
        figure.add_scatter(
            x=[row["regions"] for row in chosen],
            y=[row["error"] for row in chosen],
            name=name,
            mode="lines+markers",
            line={"color": colour},
        )
    figure.update_xaxes(type="log", title_text="regions the context is cut into", tickvals=[1, 2, 4, 8, 16, 32, 64])
    figure.update_yaxes(type="log", title_text="relative error of the output", exponentformat="power")
    figure.update_layout(height=400, width=820)
    return figure


def region_mass(mass: np.ndarray, labels: Sequence[str], share: Sequence[float]) -> go.Figure:
    """Softmax mass by region: mass [heads, 3] (sink, main, recent); the last bar is `share`, of positions."""
    figure = go.Figure()
    for column, (region, colour) in enumerate(REGION_COLOURS.items()):
        y = [*mass[:, column], share[column]]
        figure.add_bar(x=[*labels, "positions"], y=y, name=region, marker_color=colour)
    figure.update_yaxes(title_text="share of softmax mass", range=[0, 1])
    figure.update_layout(barmode="stack", height=400, width=820)
    return figure


def error_by_context(contexts: Sequence[int], errors: Mapping[str, Sequence[float]]) -> go.Figure:
    """Relative error of decode attention against context length, a line a precision, in the fixed colours."""
    figure = go.Figure()
    for precision in (name for name in PRECISION_COLOURS if name in errors):
        figure.add_scatter(
            x=list(contexts),
            y=list(errors[precision]),
            name=PRECISION_NAMES[precision],
            line={"color": PRECISION_COLOURS[precision], "width": 3},
        )
    figure.update_xaxes(title_text="context tokens")
    ticks = [10.0**exponent * step for exponent in range(-5, 1) for step in (1, 3)]
    figure.update_yaxes(type="log", title_text="relative error of the attention output", tickvals=ticks)
    figure.update_layout(height=400, width=820)
    return figure
