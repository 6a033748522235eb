"""Training figures (Fig. 7, A7 at our scale): curves per precision, token ages, page occupancy, TIS weights."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.evaluation.metrics import t_95
from kv4rl.viz.style import ACCENT, PRECISION_COLOURS, PRECISION_NAMES

OCCUPANCY_POINTS = 500  # of a trace that are drawn
PANELS = (
    ("critic/score/mean", "mean reward"),
    ("response_length/mean", "completed response, tokens"),
    ("actor/kl_loss", "k3 to the initial policy, nats"),
    ("rollout_corr/k3_kl", "sampler mismatch (k3), nats"),
)


def learning_curves(runs: Mapping[str, Sequence[Sequence[Mapping]]], *, panels=PANELS, window: int = 5) -> go.Figure:
    """One panel a metric, one colour a precision: trailing means of `window` updates, averaged over runs.

    Several runs give a 95 % band (Student's t over runs); of a single one the raw values stand behind, faint.
    Args: runs: precision -> runs (seeds), each the metric lines (`kv4rl.metrics`) of its updates in order. Runs of
    unequal length are drawn as far as the shortest.
    """
    titles = [title for _, title in panels]
    between = 0.3 / len(panels)  # room for tick labels such as -0.001
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles, horizontal_spacing=between)
    for precision, seeds in runs.items():
        for column, (name, _) in enumerate(panels, start=1):
            values = [np.array([line[name] for line in lines if name in line], dtype=float) for lines in seeds]
            length = min(map(len, values), default=0)
            table = np.array([one[:length] for one in values])
            traces = _precision_traces(precision, table, window, legend=column == 1)
            figure.add_traces(traces, rows=1, cols=column)
    updates = max((len(lines) for seeds in runs.values() for lines in seeds), default=0)
    figure.update_xaxes(title_text="policy update", dtick=max(1, 5 * round(updates / 25)))  # no tick between updates
    figure.update_yaxes(exponentformat="power", nticks=6)
    figure.update_annotations(font_size=14, yshift=8)  # the panels' titles, apart from each other and the top tick
    figure.update_layout(height=385, width=300 * len(panels), margin={"t": 85})  # a title stands above the panels'
    return figure


def _precision_traces(precision: str, values: np.ndarray, window: int, *, legend: bool) -> list[go.Scatter]:
    """The mean of `values` [runs, updates], and behind it the band, or the one run's raw values."""
    updates, colour = np.arange(1, values.shape[1] + 1), PRECISION_COLOURS[precision]
    smooth = np.array([trailing_mean(run, window) for run in values])
    mean = smooth.mean(axis=0)
    thick = go.Scatter(
        x=updates, y=mean, line={"color": colour, "width": 3}, name=PRECISION_NAMES[precision],
        legendgroup=precision, showlegend=legend,
    )  # fmt: skip
    behind = {"showlegend": False, "legendgroup": precision, "hoverinfo": "skip"}
    if len(values) == 1:
        faint = {"color": colour, "width": 1}
        return [go.Scatter(x=updates, y=values[0], line=faint, opacity=0.3, **behind), thick]
    half = t_95(len(values)) * smooth.std(axis=0, ddof=1) / np.sqrt(len(values))
    around = np.concatenate([mean + half, (mean - half)[::-1]])
    there_and_back = np.concatenate([updates, updates[::-1]])
    shade = go.Scatter(x=there_and_back, y=around, fill="toself", fillcolor=colour, opacity=0.15, mode="none", **behind)
    return [shade, thick]


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values up to each one (shorter at the start)."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    return (sums[stop] - sums[start]) / np.maximum(1, stop - start)


def token_ages(ages: Sequence[int], *, title: str = "") -> go.Figure:
    """Share of trained tokens by age: policy updates between the sampling of a token and its use."""
    counts = np.bincount(np.asarray(ages, dtype=int)) if len(ages) else np.zeros(1)
    figure = go.Figure(go.Bar(x=np.arange(len(counts)), y=counts / max(1, counts.sum()), marker_color=ACCENT))
    figure.update_xaxes(title_text="token age, policy updates", dtick=1)
    figure.update_yaxes(title_text="share of trained tokens", tickformat=".0%")
    figure.update_layout(title=title, height=360, width=560)
    return figure


def tis_weights(weights: Sequence[float], clip: float) -> go.Figure:
    """Histogram of log10 tis_weight (Eq. 3.5, clipped at C); a sampler equal to the learner is one bar at 0."""
    figure = go.Figure(go.Histogram(x=np.log10(np.maximum(weights, 1e-6)), nbinsx=80, marker_color=ACCENT))
    figure.add_vline(x=float(np.log10(clip)), line_dash="dash", annotation_text=f"C = {clip:g}")
    figure.update_xaxes(title_text="log10 tis_weight")
    figure.update_yaxes(title_text="tokens", type="log", dtick=1, exponentformat="power")
    figure.update_layout(height=360, width=560)
    return figure


def occupancy(trace: Mapping[str, Sequence], total_pages: int) -> go.Figure:
    """Active requests (B_t) and used pages per engine step, with the collection boundaries (Fig. 2a at our scale)."""
    total = len(trace["active_requests"])
    steps = np.arange(0, total, -(-total // OCCUPANCY_POINTS) or 1)
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    shown = {name: np.asarray(trace[name])[steps] for name in ("active_requests", "used_pages")}
    active = go.Scatter(x=steps, y=shown["active_requests"], name="active requests", line={"color": "#009E73"})
    pages = go.Scatter(x=steps, y=shown["used_pages"], name="used pages", line={"color": "#D55E00", "dash": "dot"})
    figure.add_trace(active, secondary_y=False)
    figure.add_trace(pages, secondary_y=True)
    collection = np.asarray(trace["collection"])
    for boundary in np.flatnonzero(np.diff(collection)) + 1:
        figure.add_vline(x=int(boundary), line={"color": "#BBBBBB", "width": 1})
    figure.update_xaxes(title_text="engine step (grey lines: policy updates)")
    figure.update_yaxes(title_text="active requests", secondary_y=False, rangemode="tozero")
    right = {"secondary_y": True, "showgrid": False, "rangemode": "tozero", "tickmode": "auto"}  # round numbers
    figure.update_yaxes(title_text=f"used pages of {total_pages:,}", **right)
    figure.update_layout(height=380, width=900)
    return figure
