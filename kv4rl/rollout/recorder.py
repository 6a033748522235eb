"""Trace rows of one simulated replica: runs of quiet steps are kept as runs until their interval ends."""

import numpy as np

from kv4rl.config import PAGE_TOKENS
from kv4rl.engine.protocol import StepStats
from kv4rl.rollout.trace import Trace

_KINDS = ("decode", "prefill", "mixed", "idle")


class Recorder:
    """Collects runs of equal steps; `flush` expands them into the columns of a `Trace`."""

    def __init__(self, trace: Trace, replica: int):
        self._trace, self._replica = trace, replica
        self._clear()

    def quiet(
        self, rows: int, context: int, carried_rows: int, carried: int, used_pages: np.ndarray, step_ms: np.ndarray
    ) -> None:
        """A run of pure-decode steps: contexts grow by one token per row and step."""
        self._runs.append((0, len(step_ms), rows, context, carried_rows, carried, 0, 0))
        self._used_pages.append(used_pages)
        self._step_ms.append(step_ms)

    def event(self, step: StepStats, carried: int) -> None:
        """One step in which something happened."""
        kind, rows = _KINDS.index(step.kind), step.active_requests
        self._runs.append((kind, 1, rows, step.context_tokens, 0, carried, step.prefill_tokens, step.preemptions))
        self._used_pages.append(np.array([step.used_pages]))
        self._step_ms.append(np.array([step.step_ms]))

    def flush(self, collection: int, policy_version: int, bytes_per_page: int) -> None:
        """Append everything recorded to the trace, as rows of this interval."""
        if not self._runs:
            return
        runs = np.array(self._runs, dtype=np.int64)
        steps = runs[:, 1]
        kind, _, rows, context, carried_rows, carried, prefill, preemptions = np.repeat(runs, steps, axis=0).T
        since = np.arange(steps.sum()) - np.repeat(np.cumsum(steps) - steps, steps)  # step within its run
        context, carried = context + rows * since, carried + carried_rows * since
        used_pages = np.concatenate(self._used_pages)
        whole = np.ones(len(since), dtype=np.int64)
        self._trace.extend(
            {
                "kind": np.array(_KINDS)[kind],
                "collection": collection * whole,
                "policy_version": policy_version * whole,
                "replica": self._replica * whole,
                "active_requests": rows,
                "context_tokens": context,
                "carried_context_tokens": carried,
                "fresh_context_tokens": context - carried,
                "resident_kv_bytes": context * bytes_per_page // PAGE_TOKENS,
                "prefill_tokens": prefill,
                "decode_tokens": rows,
                "used_pages": used_pages,
                "preemptions": preemptions,
                "step_ms": np.concatenate(self._step_ms),
            }
        )
        self._clear()

    def _clear(self) -> None:
        self._runs: list[tuple[int, ...]] = []
        self._used_pages: list[np.ndarray] = []
        self._step_ms: list[np.ndarray] = []
