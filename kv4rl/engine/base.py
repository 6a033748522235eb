"""What the real engine and its model-free twin share: every engine operation, over one scheduler."""

from abc import ABC, abstractmethod
from time import perf_counter

from kv4rl.config import PAGE_TOKENS, require
from kv4rl.engine.protocol import StepStats
from kv4rl.engine.request import Request
from kv4rl.engine.scheduler import Scheduler, StepPlan


class BatchingEngine(ABC):
    """An `Engine` whose subclass only says what a planned step samples."""

    def __init__(self, scheduler: Scheduler, *, bytes_per_page: int):
        self.scheduler = scheduler
        self.bytes_per_page = bytes_per_page
        self.policy_version = 0
        self.last_step: StepStats | None = None
        self.steps = 0  # taken so far; errors name it
        self._device_ms: float | None = None  # of the latest step, where a subclass measures it

    @abstractmethod
    def _run(self, plan: StepPlan) -> tuple[list[int], list[float]]:
        """Compute the step; returns one token and its log-probability per entry of `plan.sampled`."""

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request, new or carried. Raises `ValueError`, naming both numbers, if it can never fit."""
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Run one scheduling step; returns the requests that finished in it, each exactly once."""
        begin = perf_counter()
        self.steps += 1
        plan = self.scheduler.schedule()
        used_pages = self.scheduler.used_pages
        context_tokens = int(self.scheduler.table.context[plan.slots].sum())
        tokens, logps = self._run(plan) if plan.kind != "idle" else ([], [])
        finished = self.scheduler.commit(plan, tokens, logps, self.policy_version)
        self.last_step = StepStats(
            kind=plan.kind,
            active_requests=len(plan.decode),
            context_tokens=context_tokens,
            resident_kv_bytes=context_tokens * self.bytes_per_page // PAGE_TOKENS,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=len(plan.decode),
            used_pages=used_pages,
            preemptions=plan.preemptions,
            step_ms=(perf_counter() - begin) * 1e3,
            device_ms=self._device_ms,
        )
        return finished

    def abort(self, request: Request) -> None:
        """End a request in any state; everything generated is kept, a finished request stays as it is."""
        self.scheduler.abort(request)

    def pause(self) -> list[Request]:
        """Evict and forget every unfinished request, in priority order: tokens kept, pages and slots freed."""
        return self.scheduler.pause()

    def check_drained(self) -> None:
        """Raise `RuntimeError` if any request, slot, page or workspace token is still held."""
        scheduler = self.scheduler
        held = {
            "unfinished requests": len(scheduler.unfinished),
            "slots": scheduler.num_resident,
            "pages": scheduler.used_pages,
            "workspace tokens": scheduler.workspace_used,
        }
        if any(held.values()):
            raise RuntimeError("the engine still holds " + ", ".join(f"{n} {name}" for name, n in held.items()))

    def _begin_version(self, version: int) -> None:
        """Check that weights may change: nothing resident, so no K/V of an older policy can be read afterwards."""
        resident = self.scheduler.num_resident
        if resident:
            raise RuntimeError(
                f"{resident} requests still hold K/V of policy_version {self.policy_version}: pause first"
            )
        require(version >= self.policy_version, "version", version, f"at least {self.policy_version}, the one in use")
