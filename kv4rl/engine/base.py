"""What the real engine and its model-free twin share: every engine operation, over one scheduler."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from kv4rl.config import PAGE_TOKENS, require
from kv4rl.engine.page_table import NEVER
from kv4rl.engine.protocol import StepStats
from kv4rl.engine.request import Request
from kv4rl.engine.scheduler import Scheduler, StepPlan


@dataclass(frozen=True)
class Flight:
    """A step that was launched and whose tokens nobody has looked at yet."""

    plan: StepPlan
    used_pages: int  # held while it runs
    launched: object  # what `_launch` returned


class BatchingEngine(ABC):
    """An `Engine` whose subclass only says what a planned step samples.

    With `overlap` a pure-decode step is launched before the tokens of the one before it are looked at, so that a device
    never waits for the host: its rows take their tokens from the results of that step, on the device. Each `step`
    still records one step, the one that would have run without overlap; what is under way beyond it is known to
    nobody, and `add`, `abort` and `pause` drop it. One thing differs: a response that ends by a sampled end-of-sequence
    token decodes once more, for nothing, and what it frees can be given out one step later. Its pages are freed while
    that row may still write there: whoever gets them writes later, as launches run in order.
    """

    def __init__(self, scheduler: Scheduler, *, bytes_per_page: int, overlap: bool = False):
        self.scheduler = scheduler
        self.bytes_per_page = bytes_per_page
        self.overlap = overlap
        self.policy_version = 0
        self.last_step: StepStats | None = None
        self.steps = 0  # taken so far; errors name it
        self._device_ms: float | None = None  # of the latest step, where a subclass measures it
        self._ends = np.full(scheduler.limits.slots, NEVER)  # prompt and response tokens of each slot, where known
        self._flight: Flight | None = None  # launched ahead by the latest step

    @abstractmethod
    def _launch(self, plan: StepPlan) -> object:
        """Start computing the step; `_land` gets what is returned."""

    def _land(self, plan: StepPlan, launched: object) -> tuple[list[int], list[float]]:
        """Wait for the step: one token and its log-probability per entry of `plan.sampled`."""
        return launched

    def _plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after `plan`, if it can be launched now (`Scheduler.plan_ahead`)."""
        return self.scheduler.plan_ahead(plan, self._ends)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request, new or carried. Raises `ValueError`, naming both numbers, if it can never fit."""
        self.scheduler.add(request)
        self._flight = None

    def step(self) -> list[Request]:
        """Run one scheduling step; returns the requests that finished in it, each exactly once.

        A step that raises records nothing and can be taken again. `RolloutEngine` raises `NonFiniteLogits`,
        `PlanTooLarge` out of memory, `PeerLost` where a rank of its group is gone, and `RuntimeError` while its weights
        are half written or its memory is given back.
        """
        begin = perf_counter()
        self.steps += 1
        flight = self._taken_up() or self._take_off(self.scheduler.schedule())
        ahead = self._take_off_ahead(flight.plan) if self.overlap else None
        landed = self._land(flight.plan, flight.launched) if flight.plan.kind != "idle" else ([], [])
        plan, tokens, logps = self.scheduler.still_held(flight.plan, *landed)
        context_tokens = int(self.scheduler.table.context[plan.slots].sum())
        finished = self.scheduler.commit(plan, tokens, logps, self.policy_version)
        self._flight = ahead
        self.last_step = StepStats(
            kind=plan.kind,
            active_requests=len(plan.decode),
            context_tokens=context_tokens,
            resident_kv_bytes=context_tokens * self.bytes_per_page // PAGE_TOKENS,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=len(plan.decode),
            used_pages=flight.used_pages,
            preemptions=plan.preemptions,
            step_ms=(perf_counter() - begin) * 1e3,
            device_ms=self._device_ms,
        )
        return finished

    def _taken_up(self) -> Flight | None:
        """The step launched ahead, unless all of its rows have turned out to have ended."""
        flight, self._flight = self._flight, None
        return flight if flight is not None and self.scheduler.holds_any(flight.plan) else None

    def _take_off(self, plan: StepPlan) -> Flight:
        return Flight(plan, self.scheduler.used_pages, self._launch(plan) if plan.kind != "idle" else None)

    def _take_off_ahead(self, plan: StepPlan) -> Flight | None:
        ahead = self._plan_ahead(plan)
        if ahead is None:
            return None
        return Flight(ahead, int(self.scheduler.table.held[ahead.slots].sum()), self._launch(ahead))

    def abort(self, request: Request) -> None:
        """End a request in any state; everything generated is kept, a finished request stays as it is."""
        self.scheduler.abort(request)
        self._flight = None

    def pause(self) -> list[Request]:
        """Evict and forget every unfinished request, in priority order: tokens kept, pages and slots freed."""
        self._flight = None
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
        self._flight = None
        resident = self.scheduler.num_resident
        if resident:
            raise RuntimeError(
                f"{resident} requests still hold K/V of policy_version {self.policy_version}: pause first"
            )
        newer = isinstance(version, int) and version >= self.policy_version
        require(newer, "version", version, f"an integer of at least {self.policy_version}, the one in use")
