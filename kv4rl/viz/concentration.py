"""Prop. 4.1 drawn: one wave against continuous refill, C_KV by slots, and the length seen in a slot."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.theory import concentration
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.viz.style import ACCENT

SYNC, ASYNC = "#555555", "#009E73"
MARGIN = {"t": 45, "b": 65}
POWERS = {"type": "log", "tickvals": [2, 8, 32, 128, 512, 2048], "title_text": "slots B"}


def schedules(lengths: Sequence[int], slots: int) -> go.Figure:
    """The same responses on `slots` slots: a wave after another (left) and refilled at once (right); a bar each."""
    waves, refill = _wave_starts(lengths, slots), _refill_starts(lengths, slots)
    end = max(start + length for start, _, length in waves)
    titles = ("synchronous waves", "continuous refill")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, shared_yaxes=True)
    for column, (bars, colour) in enumerate(((waves, SYNC), (refill, ASYNC)), start=1):
        starts, rows, spans = (list(values) for values in zip(*bars, strict=True))
        line = {"color": "white", "width": 1}
        bar = go.Bar(base=starts, x=spans, y=rows, orientation="h", marker={"color": colour, "line": line})
        figure.add_trace(bar, row=1, col=column)
    figure.update_xaxes(title_text="decode step", range=[0, end])
    figure.update_yaxes(title_text="slot", col=1, autorange="reversed")
    figure.update_layout(showlegend=False, height=300, width=900, bargap=0.15, margin=MARGIN)
    return figure


def by_slots(laws: Mapping[str, LengthDistribution], slots: Sequence[int], mark: int | None = None) -> go.Figure:
    """C_KV = E[M_B] / E[L] and the occupancy of a wave against the slots B, one curve a law; `mark` one B."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=("KV concentration C_KV", "active requests of a wave"))
    for index, (name, law) in enumerate(laws.items()):
        factors = np.array([concentration.kv_concentration(law, b) for b in slots])
        line = {"width": 3, "color": _COLOURS[index % len(_COLOURS)]}
        common = {"x": list(slots), "name": name, "line": line, "legendgroup": name, "mode": "lines"}
        figure.add_trace(go.Scatter(y=factors, **common), row=1, col=1)
        figure.add_trace(go.Scatter(y=np.asarray(slots) / factors, showlegend=False, **common), row=1, col=2)
    ideal = go.Scatter(
        x=list(slots), y=list(slots), name="refill: B", line={"color": ASYNC, "dash": "dot"}, mode="lines"
    )
    figure.add_trace(ideal, row=1, col=2)
    if mark is not None:
        figure.add_vline(x=mark, line={"color": "#999999", "dash": "dash"})
    figure.update_xaxes(**POWERS)
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    figure.update_yaxes(type="log", dtick=1, row=1, col=2)
    figure.update_layout(height=350, width=900, margin=MARGIN)
    return figure


def length_bias(law: LengthDistribution, observed: Sequence[int] = (), bins: int = 60) -> go.Figure:
    """The law of L and of L* (A5), in equal bins; `observed`: lengths seen in slots, as a histogram behind."""
    edges = np.linspace(0, law.cap, bins + 1)
    figure = go.Figure()
    if len(observed):
        shares, _ = np.histogram(observed, edges)
        bars = {"x": _centres(edges), "y": shares / shares.sum(), "marker_color": "#CCCCCC"}
        figure.add_bar(name="seen in slots (simulated)", **bars)
    for name, shown, colour in (
        ("L, one a response", law, SYNC),
        ("L*, one a slot-step", concentration.length_biased(law), ASYNC),
    ):
        shares, _ = np.histogram(shown.support, edges, weights=shown.probabilities)
        figure.add_scatter(
            x=_centres(edges), y=shares, name=f"{name}: mean {shown.mean:,.0f}", line_color=colour, mode="lines"
        )
    figure.update_xaxes(title_text="response length, tokens")
    figure.update_yaxes(title_text="probability")
    figure.update_layout(height=340, width=800, bargap=0, margin=MARGIN)
    return figure


def explore(law: LengthDistribution, slots: int, prompt_tokens: int) -> go.Figure:
    """What the proposition says of one law at B slots: three panels, with the values in the titles."""
    factor = concentration.kv_concentration(law, slots)
    occupancy = concentration.wave_occupancy(law, slots)
    context = concentration.refill_context(law, prompt_tokens)
    wave = concentration.wave_context(law, slots, prompt_tokens)
    titles = (
        f"C_KV = {factor:.2f} at B = {slots}",
        f"active {occupancy:.0f} (sync), {slots} (refill)<br>context {wave:,.0f} (sync), {context:,.0f} (refill)",
        f"lengths: mean {law.mean:,.0f} a response,<br>{concentration.length_biased(law).mean:,.0f} seen in a slot",
    )
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles, horizontal_spacing=0.13)
    grid = np.unique(np.geomspace(2, 2048, 24).astype(int))
    factors = [concentration.kv_concentration(law, int(b)) for b in grid]
    quiet = {"showlegend": False, "row": 1, "col": 1}
    figure.add_scatter(x=grid, y=factors, line_color=ACCENT, mode="lines", **quiet)
    figure.add_scatter(x=[slots], y=[factor], mode="markers", marker={"size": 11, "color": ACCENT}, **quiet)
    steps, active = survivors(law, slots)
    wave_line = {"line": {"color": SYNC, "shape": "hv"}, "name": "a wave"}
    figure.add_scatter(x=steps, y=active, mode="lines", **wave_line, row=1, col=2)
    refill_line = {"line": {"color": ASYNC, "dash": "dot"}, "name": "refill"}
    figure.add_scatter(x=[0, steps[-1]], y=[slots, slots], mode="lines", **refill_line, row=1, col=2)
    for found, name in zip(length_bias(law).data, ("L, one a response", "L*, one a slot-step"), strict=True):
        figure.add_trace(found.update(name=name), row=1, col=3)
    figure.update_annotations(font_size=13)
    figure.update_layout(
        xaxis=POWERS, xaxis2_title_text="decode step of a wave", xaxis3_title_text="response length, tokens",
        yaxis_title_text="C_KV", yaxis2_title_text="active requests", yaxis3_title_text="probability",
        height=390, width=920, margin={"t": 55, "b": 110},
        legend={"orientation": "h", "x": 0.36, "y": -0.25, "yanchor": "top"},
    )  # fmt: skip
    return figure


def survivors(law: LengthDistribution, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected active requests of a wave at each step: B Pr(L > t)."""
    steps = np.concatenate([[0], law.support])
    return steps, slots * np.concatenate([[1.0], law.survival])


def _wave_starts(lengths: Sequence[int], slots: int) -> list[tuple[int, int, int]]:
    bars, begin = [], 0
    for first in range(0, len(lengths), slots):
        wave = lengths[first : first + slots]
        bars += [(begin, slot, length) for slot, length in enumerate(wave)]
        begin += max(wave)
    return bars


def _refill_starts(lengths: Sequence[int], slots: int) -> list[tuple[int, int, int]]:
    free, bars = [0] * slots, []
    for length in lengths:
        slot = free.index(min(free))
        bars.append((free[slot], slot, length))
        free[slot] += length
    return bars


def _centres(edges: np.ndarray) -> np.ndarray:
    return (edges[:-1] + edges[1:]) / 2


_COLOURS = ("#0072B2", "#D55E00", "#CC79A7", "#E69F00")
