"""Whole training iterations, phase by phase (Fig. A8, Fig. 6b at iteration level), from rows of iteration.csv."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

import plotly.graph_objects as go

from kv4rl.config import PRECISIONS
from kv4rl.viz.rows import without_empty_columns
from kv4rl.viz.style import PRECISION_NAMES

PHASES = {  # metric of the rows -> (name, colour)
    "rollout_s": ("rollout", "#009E73"),
    "logprob_s": ("log-probs", "#56B4E9"),
    "update_s": ("update", "#E69F00"),
    "sync_s": ("weight sync", "#CC79A7"),
    "switch_s": ("phase switches", "#999999"),
}


NO_ROLLOUT = "learner"  # the arm that is fed made-up groups


def phase_seconds(
    rows: Sequence[Mapping[str, str]], arms: Sequence[str] = PRECISIONS
) -> dict[tuple[str, str, str], dict[str, float]]:
    """(model, shape, arm) -> metric -> value, in the arms' order, from rows of `iteration.csv`."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for arm in arms:
        for row in rows:
            if row["arm"] == arm:
                found.setdefault((row["model"], row["shape"], arm), {})[row["metric"]] = float(row["value"])
    return dict(sorted(found.items(), key=lambda item: item[0][:2]))


def iteration_rows(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """One dict a run: seconds of each phase and of the whole, rollout's share, speedup over BF16.

    "-" stands where a run has no such value; a column of those alone is left out. "learner simulated": it was timed on
    part of its tokens, its seconds multiplied; the collection is the run's own.
    """
    lines, place = [], itemgetter("model", "shape", "arm")
    simulated = {place(row) for row in rows if row["scope"] == "simulated"}
    for run, values in phase_seconds(rows, (*PRECISIONS, NO_ROLLOUT)).items():
        model, shape, arm = run
        line = {"model": model, "lengths": shape, "rollout through": "no rollout" if arm == NO_ROLLOUT else arm}
        named = {metric: name for metric, (name, _) in PHASES.items()}
        named |= {"iteration_s": "iteration", "checkpoint_s": "checkpoint stops it"}
        line |= {f"{name}, s": _shown(values, metric, ".2f") for metric, name in named.items()}
        line["learner, of dense BF16"] = _shown(values, "learner_share_of_dense", ".0%")
        whole = {"rollout_s", "iteration_s"} <= values.keys()
        line["rollout share"] = f"{values['rollout_s'] / values['iteration_s']:.0%}" if whole else "-"
        line["over BF16"] = _shown(values, "speedup_vs_bf16", ".2f")
        lines.append(line | {"scope": "learner simulated" if run in simulated else "measured"})
    return without_empty_columns(lines)


def unpaired(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Runs without one through BF16 beside them, in words: their gain is not measured."""
    found = phase_seconds(rows)
    missing = {(model, shape) for model, shape, _ in found} - {(m, s) for m, s, arm in found if arm == "bf16"}
    return [f"{model}, {shape}: BF16 not measured, so no gain" for model, shape in sorted(missing)]


def _shown(values: Mapping[str, float], metric: str, form: str) -> str:
    return f"{values[metric]:{form}}" if metric in values else "-"


def iteration_phases(rows: Sequence[Mapping[str, str]]) -> go.Figure:
    """One stacked bar a model, length law and precision; a colour a phase."""
    found = phase_seconds(rows)
    labels = [f"{model}, {shape}, {PRECISION_NAMES[precision]}" for model, shape, precision in found]
    figure = go.Figure()
    for metric, (name, colour) in PHASES.items():
        values = [entry.get(metric) for entry in found.values()]
        figure.add_bar(y=labels, x=values, name=name, orientation="h", marker_color=colour)
    figure.update_xaxes(title_text="seconds of one training iteration")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(
        barmode="stack", height=170 + 40 * len(found), width=900, legend={"orientation": "h", "y": 1.15}
    )
    return figure
