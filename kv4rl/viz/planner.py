"""The planner's answer, drawn: what each cache format holds and how fast it should decode."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kv4rl.config import PRECISIONS, KVConfig
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.planner import Plan, plan, speedup
from kv4rl.theory.step_cost import StepCost
from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES


def plans(
    cost: StepCost, lengths: LengthDistribution, *, sink_tokens: int = 16, recent_tokens: int = 128, **given
) -> dict[str, Plan]:
    """A plan for each of the four precisions; `cost` gives model, GPUs and rates; keywords as for `plan`."""
    return {name: plan(_with(cost, name, sink_tokens, recent_tokens), lengths, **given) for name in PRECISIONS}


def plan_rows(cost: StepCost, lengths: LengthDistribution, **given) -> list[dict[str, str]]:
    """One line a precision for `notebook.table`."""
    sides = {name: given.pop(name) for name in ("sink_tokens", "recent_tokens") if name in given}
    rows = []
    for name, found in plans(cost, lengths, **sides, **given).items():
        gain = speedup(_with(cost, name, **sides), lengths, **given)
        rows.append(
            {
                "cache": PRECISION_NAMES[name],
                "pages": f"{found.pages:,}",
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
    """Active requests, resident KV and decode throughput of the four precisions side by side."""
    found = plans(cost, lengths, **given)
    names, colours = [PRECISION_NAMES[name] for name in found], [PRECISION_COLOURS[name] for name in found]
    panels = {
        "active requests": [p.active_requests for p in found.values()],
        "resident KV, GB": [p.resident_kv_gb for p in found.values()],
        "decode tokens per second": [p.tokens_per_second for p in found.values()],
    }
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels))
    for column, values in enumerate(panels.values(), start=1):
        figure.add_trace(go.Bar(x=names, y=values, marker_color=colours), row=1, col=column)
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(showlegend=False, height=290, width=860, margin={"t": 45, "b": 40})
    return figure


def _with(cost: StepCost, precision: str, sink_tokens: int = 16, recent_tokens: int = 128) -> StepCost:
    kv = KVConfig(precision, sink_tokens, recent_tokens)
    return StepCost(cost.model, kv, cost.tensor_parallel, cost.rates)
