"""Whole training iterations, phase by phase (Fig. A8, Fig. 6b at iteration level), from rows of iteration.csv."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kv4rl.config import PRECISIONS
from kv4rl.viz.style import PRECISION_NAMES

PHASES = {  # metric of the rows -> (name, colour)
    "rollout_s": ("rollout", "#009E73"),
    "logprob_s": ("log-probs", "#56B4E9"),
    "update_s": ("update", "#E69F00"),
    "sync_s": ("weight sync", "#CC79A7"),
    "switch_s": ("phase switches", "#999999"),
}


def phase_seconds(rows: Sequence[Mapping[str, str]]) -> dict[tuple[str, str, str], dict[str, float]]:
    """(model, shape, precision) -> metric -> value, in the precisions' order, from rows of `iteration.csv`."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for precision in PRECISIONS:
        for row in rows:
            if row["arm"] == precision:
                found.setdefault((row["model"], row["shape"], precision), {})[row["metric"]] = float(row["value"])
    return dict(sorted(found.items(), key=lambda item: item[0][:2]))


def iteration_rows(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """One dict a run: seconds of each phase and of the whole, rollout's share, speedup over BF16."""
    lines = []
    for (model, shape, precision), values in phase_seconds(rows).items():
        line = {"model": model, "lengths": shape, "rollout through": precision}
        line |= {f"{name}, s": f"{values[metric]:.1f}" for metric, (name, _) in PHASES.items() if metric in values}
        if "iteration_s" in values:
            line["iteration, s"] = f"{values['iteration_s']:.1f}"
            line["rollout share"] = f"{values['rollout_s'] / values['iteration_s']:.0%}"
        if "speedup_vs_bf16" in values:
            line["over BF16"] = f"{values['speedup_vs_bf16']:.2f}x"
        lines.append(line)
    return lines


def iteration_phases(rows: Sequence[Mapping[str, str]]) -> go.Figure:
    """One stacked bar a model, length law and precision; a colour a phase."""
    found = phase_seconds(rows)
    labels = [
        [f"{model}<br>{shape}" for model, shape, _ in found], [PRECISION_NAMES[precision] for *_, precision in found]
    ]  # fmt: skip
    figure = go.Figure()
    for metric, (name, colour) in PHASES.items():
        values = [entry.get(metric) for entry in found.values()]
        figure.add_bar(y=labels, x=values, name=name, orientation="h", marker_color=colour)
    figure.update_xaxes(title_text="seconds of one training iteration")
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        barmode="stack", height=170 + 40 * len(found), width=900, legend={"orientation": "h", "y": 1.15}
    )
    return figure
