"""What the arms of a rollout gave: on one replica, over all of them, and as gains, rows and tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from kv4rl.bench.trace_bins import Bin
from kv4rl.ranks import Ranks, Replica
from kv4rl.results import result_row
from kv4rl.rollout.paper_traces import ratios
from kv4rl.rollout.simulator import TraceSummary

BALANCE = "responses_most_over_fewest"
UNITS = {
    "active_requests": "requests", "resident_kv_bytes": "B", "decode_step_ms": "ms", "decode_tokens_per_s": "tokens/s",
    "decode_wall_tokens_per_s": "tokens/s",
    "calls_per_interval": "calls", "collection_s": "s", "cache_pages": "pages", "preemptions": "requests", BALANCE: "x",
}  # fmt: skip
SUMMED = ("decode_tokens_per_s", "decode_wall_tokens_per_s", "preemptions")  # over replicas; the rest are means


@dataclass(frozen=True)
class Outcome:
    """One arm: metric -> value, the seconds of each measured collection, and the means behind Fig. 2.

    `responses`: what each replica finished in the measured intervals.
    """

    metrics: dict[str, float]
    seconds: list[float]
    summary: TraceSummary | None = None
    responses: tuple[int, ...] = ()
    bins: tuple[Bin, ...] = ()  # of the measured intervals, one replica's


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
    return Outcome(metrics, seconds, TraceSummary(**means), responses, parts[0].bins)


def _combined(name: str, metrics: Sequence[Mapping[str, float]]) -> float:
    values = [part[name] for part in metrics]
    return float(np.sum(values) if name in SUMMED else np.mean(values))


def gains(found: dict[tuple[str, str], Outcome]) -> dict[str, dict[str, float]]:
    """precision -> collection speedups over BF16: together, at BF16's pages, and what the pages add, as far as run."""
    total = {key: sum(outcome.seconds) for key, outcome in found.items()}
    if ("bf16", "own pages") not in total:
        return {}
    made: dict[str, dict[str, float]] = {}
    for (name, pages), seconds in total.items():
        if name != "bf16":
            metric = "speedup_vs_bf16" if pages == "own pages" else "speedup_at_bf16_pages"
            made.setdefault(name, {})[metric] = total["bf16", "own pages"] / seconds
    for values in made.values():
        if len(values) == 2:
            values["speedup_of_capacity"] = values["speedup_vs_bf16"] / values["speedup_at_bf16_pages"]
    return made


def rows(shape: str, model: str, traces: Mapping[str, Outcome], found: Mapping[tuple[str, str], Outcome]) -> list[dict]:
    """CSV rows of one fit: the schedulers' metrics and ratios, the precisions' metrics and gains."""
    about = {"experiment": "rollout", "model": model, "shape": shape}
    made = []
    arms = [(name, "", outcome) for name, outcome in traces.items()]
    arms += [(name, "" if pages == "own pages" else "_at_bf16_pages", o) for (name, pages), o in found.items()]
    for arm, suffix, outcome in arms:
        per = np.array(outcome.seconds)
        bounds = {"low": float(per.min()), "high": float(per.max()), "n": len(per)}
        given = {"arm": arm, "metric": f"collection_s{suffix}", "unit": "s", "value": float(per.mean())}
        made.append(result_row(**about, **given, **bounds))
        for metric, value in outcome.metrics.items():
            given = {"arm": arm, "metric": metric + suffix, "unit": UNITS[metric], "value": value}
            made.append(result_row(**about, **given, n=len(per)))
    if len(traces) == 2:
        summaries = {name: outcome.summary for name, outcome in traces.items()}
        for metric, value in ratios(**summaries).items():
            made.append(result_row(**about, arm="partial_over_sync", metric=metric, unit="x", value=value))
    for arm, values in gains(found).items():
        made += [result_row(**about, arm=arm, metric=m, unit="x", value=v) for m, v in values.items()]
    return made


def table(title: str, outcomes: dict) -> str:
    """Lines of one comparison, an arm a line."""
    names = ("active_requests", "decode_step_ms", "decode_tokens_per_s", "decode_wall_tokens_per_s", "cache_pages")
    lines = [f"{title:>24} " + " ".join(f"{name:>24}" for name in ("collection_s", *names))]
    for arm, outcome in outcomes.items():
        values = [sum(outcome.seconds) / len(outcome.seconds), *(outcome.metrics[name] for name in names)]
        label = " ".join(arm) if isinstance(arm, tuple) else arm
        lines.append(f"{label:>24} " + " ".join(f"{value:>24.4g}" for value in values))
    return "\n".join(lines)
