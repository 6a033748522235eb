"""The planner's answer, drawn: what each cache format holds and how fast it should decode."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.config import PRECISIONS, KVConfig
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.planner import Plan, Speedup, plan, speedup
from kv4rl.theory.step_cost import StepCost
from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES


def plans(
    cost: StepCost, lengths: LengthDistribution, *, sink_tokens: int = 16, recent_tokens: int = 128, **given
) -> dict[str, Plan]:
    """A plan for each of the four precisions; `cost` gives model, GPUs and rates; keywords as for `plan`."""
    return {name: plan(_with(cost, name, sink_tokens, recent_tokens), lengths, **given) for name in PRECISIONS}


def speedups(
    cost: StepCost, lengths: LengthDistribution, *, sink_tokens: int = 16, recent_tokens: int = 128, **given
) -> dict[str, Speedup]:
    """Each of the four precisions over BF16; arguments as for `plans`."""
    return {name: speedup(_with(cost, name, sink_tokens, recent_tokens), lengths, **given) for name in PRECISIONS}


def plan_rows(cost: StepCost, lengths: LengthDistribution, **given) -> list[dict[str, str]]:
    """One line a precision for `notebook.table`."""
    gains, rows = speedups(cost, lengths, **given), []
    for name, found in plans(cost, lengths, **given).items():
        gain = gains[name]
        rows.append(
            {
                "cache": PRECISION_NAMES[name],
                "pages": f"{found.pages:,}",
                "slots": f"{found.slots:,}",
                "side buffer, GB": f"{found.side_buffer_gb:.2f}",
                "active requests": f"{found.active_requests:,.0f} ({found.limited_by})",
                "resident KV, GB": f"{found.resident_kv_gb:.1f}",
                "step, ms": f"{found.step_ms:.1f}",
                "decode speedup": f"{gain.decode:.2f}x",
                "rollout speedup": f"{gain.rollout:.2f}x",
            }
        )
    return rows


def plan_figure(cost: StepCost, lengths: LengthDistribution, **given) -> go.Figure:
    """What `plan_rows` lists, drawn: pages, requests beside the slots, resident KV and both speedups, a bar each."""
    found, gains = plans(cost, lengths, **given), speedups(cost, lengths, **given)
    slots = next(iter(found.values())).slots
    panels = {
        "pages, thousands": ([p.pages / 1e3 for p in found.values()], ".1f"),
        f"active requests of {slots:,} slots": ([p.active_requests for p in found.values()], ",.0f"),
        "resident KV, GB": ([p.resident_kv_gb for p in found.values()], ".1f"),
        "decode speedup (BF16's state)": ([gain.decode for gain in gains.values()], ".2f"),
        "rollout speedup (own state)": ([gain.rollout for gain in gains.values()], ".2f"),
    }
    names, colours = [PRECISION_NAMES[name] for name in found], [PRECISION_COLOURS[name] for name in found]
    figure = make_subplots(rows=2, cols=3, subplot_titles=list(panels), vertical_spacing=0.22)
    for place, (values, style) in enumerate(panels.values()):
        texts = [format(value, style) for value in values]
        bar = go.Bar(x=names, y=values, marker_color=colours, text=texts, textposition="auto")
        figure.add_trace(bar, row=place // 3 + 1, col=place % 3 + 1)
    figure.add_hline(y=slots, line_dash="dot", line_color="#888888", row=1, col=2)
    figure.update_yaxes(rangemode="tozero")
    figure.update_annotations(font_size=13)
    figure.update_layout(showlegend=False, height=460, width=900, margin={"t": 45, "b": 40})
    return figure


def _with(cost: StepCost, precision: str, sink_tokens: int = 16, recent_tokens: int = 128) -> StepCost:
    kv = KVConfig(precision, sink_tokens, recent_tokens)
    return StepCost(cost.model, kv, cost.tensor_parallel, cost.rates)
