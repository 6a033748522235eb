"""What one arm of a rollout gave: on one replica, and over all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from kv4rl.ranks import Ranks, Replica
from kv4rl.rollout.simulator import TraceSummary

SUMMED = ("decode_tokens_per_s", "decode_wall_tokens_per_s", "preemptions")  # over replicas; the rest are means
BALANCE = "responses_most_over_fewest"


@dataclass(frozen=True)
class Outcome:
    """One arm: metric -> value, the seconds of each measured collection, and the means behind Fig. 2.

    `responses`: what each replica finished in the measured intervals.
    """

    metrics: dict[str, float]
    seconds: list[float]
    summary: TraceSummary | None = None
    responses: tuple[int, ...] = ()


def over_replicas(own: Outcome, ranks: Ranks, replica: Replica) -> Outcome:
    """The outcome of all replicas together, on every rank: a collective."""
    found = ranks.gather((replica.leads, own))
    return combined([outcome for leads, outcome in found if leads])


def combined(parts: Sequence[Outcome]) -> Outcome:
    """Rates are summed, states averaged; an interval lasts as long as the slowest replica's, as all update together."""
    if len(parts) == 1:
        return parts[0]
    responses = tuple(count for part in parts for count in part.responses)
    metrics = {name: _combined(name, [part.metrics for part in parts]) for name in parts[0].metrics}
    metrics[BALANCE] = max(responses) / max(1, min(responses))
    seconds = [max(interval) for interval in zip(*(part.seconds for part in parts), strict=True)]
    summaries = [part.summary for part in parts]
    means = {f.name: float(np.mean([getattr(s, f.name) for s in summaries])) for f in fields(TraceSummary)}
    return Outcome(metrics, seconds, TraceSummary(**means), responses)


def _combined(name: str, metrics: Sequence[Mapping[str, float]]) -> float:
    values = [part[name] for part in metrics]
    return float(np.sum(values) if name in SUMMED else np.mean(values))
