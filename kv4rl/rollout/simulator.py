"""Rollout without a model: the real collectors and scheduler over event-skipping engines (§B.3, Figs. 2 and A1)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv4rl.config import RolloutConfig, require
from kv4rl.rollout.collector import CollectionStats
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.replicas import Replicas
from kv4rl.rollout.skipping import Cost, SkippingEngine, one_step
from kv4rl.rollout.sync import SyncCollector
from kv4rl.rollout.trace import Trace
from kv4rl.rollout.workload import Workload

EOS = 1


@dataclass(frozen=True)
class Simulation:
    """Every engine step of every interval, the intervals' figures, their simulated and our own time."""

    trace: Trace
    stats: list[CollectionStats]  # `steps` counts events here; the trace has every step
    interval_ms: list[float]  # simulated time of each collection, prefill included
    trained_lengths: list[np.ndarray]  # response tokens of each collection's trained responses
    wall_s: float


@dataclass(frozen=True)
class TraceSummary:
    """The quantities of Fig. 2 and Fig. A1: means over pure-decode calls of all replicas (§B.3)."""

    active_requests: float  # mean B_t
    context_tokens: float  # mean over calls of B_t lbar_t: V_t over kappa
    slot_context: float  # context of an occupied slot (A9)
    step_ms: float
    calls_per_interval: float  # pure-decode calls of one replica in one collection
    tokens_per_second: float  # decode tokens of one replica over its decode time
    used_pages: float
    carried_share: float  # of the context
    preemptions: int

    def volume_gb(self, kv_bytes_per_token: float) -> float:
        """Mean nominal resident KV, V_t = kappa B_t lbar_t, in GB of 1e9 bytes."""
        return self.context_tokens * kv_bytes_per_token / 1e9


def simulate(
    config: RolloutConfig,
    workload: Workload,
    *,
    collections: int,
    replicas: int = 1,
    cost: Cost = one_step,
    bytes_per_page: int = 1,
) -> Simulation:
    """Run `collections` intervals with a frozen policy; T, the pool and the limits are those of `config`.

    `config.groups_per_update` is the global quota over all replicas; slots and pages are per replica. Raises
    `ValueError` for no collection, or more responses a group than the workload has lengths for.
    """
    require(collections >= 1, "collections", collections, "an integer >= 1")
    fits = config.responses_per_group <= workload.siblings
    require(fits, "responses_per_group", config.responses_per_group, f"at most siblings={workload.siblings}")
    started, trace = time.perf_counter(), Trace()
    given = {"bytes_per_page": bytes_per_page, "cost": cost, "trace": trace}
    engines = Replicas([SkippingEngine.within(config, workload, **given, replica=n) for n in range(replicas)])
    kind = {"sync": SyncCollector, "partial": PartialCollector}[config.collector]
    collector = kind(engines, workload.stream(), config, grade=None, eos_token_ids=(EOS,))
    stats, interval_ms, lengths = [], [], []
    for _ in range(collections):
        began = engines.clock_ms
        collection = collector.collect()
        stats.append(collection.stats)
        interval_ms.append(engines.clock_ms - began)
        lengths.append(np.array([len(r.tokens) for group in collection.groups for r in group.requests]))
        engines.update_weights()
    return Simulation(trace, stats, interval_ms, lengths, time.perf_counter() - started)


def summarize(trace: Trace, collections: Sequence[int] | None = None) -> TraceSummary:
    """Means over the pure-decode calls of a trace, measured or simulated; of some intervals, or of all.

    Raises `ValueError` where there is no such call.
    """
    rows = trace.pure_decode()
    if collections is not None:
        keep = np.isin(rows["collection"], list(collections))
        rows = {name: values[keep] for name, values in rows.items()}
    calls = len(rows["kind"])
    require(calls > 0, "trace", calls, "at least one pure-decode call in the intervals asked for")
    intervals = len(np.unique(rows["collection"])) * len(np.unique(rows["replica"]))
    active, context = rows["active_requests"].mean(), rows["context_tokens"].mean()
    return TraceSummary(
        active_requests=float(active),
        context_tokens=float(context),
        slot_context=float(context / active),
        step_ms=float(rows["step_ms"].mean()),
        calls_per_interval=calls / intervals,
        tokens_per_second=float(rows["decode_tokens"].sum() / rows["step_ms"].sum() * 1e3),
        used_pages=float(rows["used_pages"].mean()),
        carried_share=float(rows["carried_context_tokens"].sum() / rows["context_tokens"].sum()),
        preemptions=int(rows["preemptions"].sum()),
    )
