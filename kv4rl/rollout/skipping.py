"""A model-free engine that jumps from event to event: the real scheduler, with decode steps in between counted.

Between two events (a response ends, a request is admitted or preempted, a prefill chunk runs) every step is the same:
each decode row grows by one token, and some rows take a page. Such runs are computed at once; every event goes
through `Scheduler.schedule` and `commit` as in the other engines.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kv4rl.cache.page_allocator import OutOfPages
from kv4rl.config import PAGE_TOKENS, RolloutConfig
from kv4rl.engine.base import BatchingEngine
from kv4rl.engine.request import Request
from kv4rl.engine.scheduler import Entry, Limits, Scheduler, StepPlan
from kv4rl.rollout.recorder import Recorder
from kv4rl.rollout.trace import Trace

# cost(active_requests, context_tokens, prefill_tokens) -> milliseconds of each step; arrays of one shape.
Cost = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
LOGP = -1.0  # recorded for every simulated token


def one_step(active_requests: np.ndarray, context_tokens: np.ndarray, prefill_tokens: np.ndarray) -> np.ndarray:
    """The cost model without a model: every step takes 1."""
    return np.ones(np.shape(active_requests))


class PageCount:
    """A page allocator that only counts: a simulation asks how many pages are free, never which."""

    def __init__(self, num_pages: int):
        self.num_pages = self.num_free = num_pages

    def allocate(self, n: int) -> list[int]:
        if n > self.num_free:
            raise OutOfPages(n, self.num_free)
        self.num_free -= n
        return [0] * n

    def free(self, pages: list[int]) -> None:
        self.num_free += len(pages)


class CountingScheduler(Scheduler):
    """The scheduler, with the tokens of decode rows kept as counts until somebody looks at them.

    `left` and `lag` int64 [slots]: tokens a row will still sample, and tokens it has sampled but not recorded.
    """

    def __init__(self, allocator: PageCount, limits: Limits, lengths: Callable[[Request], int]):
        super().__init__(allocator, limits)
        self.left = np.zeros(limits.slots, dtype=np.int64)
        self.lag = np.zeros(limits.slots, dtype=np.int64)
        self.carried = np.zeros(limits.slots, dtype=bool)  # resumed from an earlier collection
        self.carried_context = 0  # context tokens of such rows in the latest step
        self.version = 0  # policy_version of the tokens counted
        self._lengths = lengths
        self._resumed: set[Request] = set()

    def add(self, request: Request) -> None:
        super().add(request)
        if request.tokens:
            self._resumed.add(request)

    def quiet_steps(self) -> int:
        """Steps from now on in which nothing happens but growth: no end, no admission, no prefill, no preemption."""
        if (
            self._prefilling
            or self._complete
            or not self._decoding
            or self._head_fits(self.num_resident, self.allocator.num_free)
        ):
            return 0
        steps = int(self.left[self._slots].min()) - 1  # the step that ends a response is an event
        if steps <= 0:
            return 0
        grown = np.cumsum(self.new_pages(steps))
        return int(np.searchsorted(grown, self.allocator.num_free, side="right"))

    def new_pages(self, steps: int) -> np.ndarray:
        """Pages that decode rows take in each of the next `steps` steps, int64 [steps]."""
        # A row with r free positions beyond its context takes a page in step r, then every 16.
        first = self.table.held[self._slots] * PAGE_TOKENS - self.table.context[self._slots] + 1
        rows = np.bincount(first, minlength=PAGE_TOKENS + 1)
        taken = np.resize(rows[:PAGE_TOKENS], steps)
        taken[PAGE_TOKENS::PAGE_TOKENS] += rows[PAGE_TOKENS]
        return taken

    def grow(self, steps: int) -> None:
        """Let every decode row sample `steps` tokens; only as many as `quiet_steps` allows."""
        slots = self._slots
        self.table.context[slots] += steps - 1
        short = self.table.short_of_page(slots)
        while len(short):
            self.table.append(short, self.allocator.allocate(len(short)))
            short = self.table.short_of_page(slots)
        self.table.context[slots] += 1
        self._count(slots, steps)

    def commit(self, plan: StepPlan, tokens: list[int], logps: list[float], version: int) -> list[Request]:
        """As the scheduler's, but only requests that end or start are recorded now; `tokens`, `logps` are not used."""
        self.carried_context = self.decode_state()[2]
        ends = self.left[plan.slots] == 1
        ending = [plan.decode[row] for row in np.flatnonzero(ends)]
        for entry in ending:
            self.settle(entry)
        others = plan.slots[~ends]
        self.table.context[others] += 1
        self._count(others, 1)
        started = [chunk.entry for chunk in plan.chunks if chunk.last]
        recorded = ending + started
        shown = StepPlan(ending, plan.slots[ends], plan.chunks, recorded, plan.preemptions)
        next_tokens = [self._next_token(entry.request) for entry in recorded]
        return super().commit(shown, next_tokens, [LOGP] * len(recorded), version)

    def settle(self, entry: Entry) -> None:
        """Record what a decode row has sampled since it was last looked at; never its last token."""
        count, request = int(self.lag[entry.slot]), entry.request
        request.tokens.extend([_plain_token(request)] * count)
        request.sampler_logp.extend([LOGP] * count)
        request.versions.extend([self.version] * count)
        self.lag[entry.slot] = 0

    def carried_rows(self) -> np.ndarray:
        """Slots of the decode rows that were resumed from an earlier collection."""
        return self._slots[self.carried[self._slots]]

    def decode_state(self) -> tuple[int, int, int]:
        """Decode rows, their context tokens in the next step, and the part of it that was carried over."""
        context = self.table.context
        return len(self._slots), int(context[self._slots].sum()), int(context[self.carried_rows()].sum())

    def settle_all(self) -> None:
        for entry in self._decoding:
            self.settle(entry)

    def pause(self) -> list[Request]:
        self.settle_all()
        self._resumed.clear()
        return super().pause()

    def abort(self, request: Request) -> None:
        self.settle_all()
        super().abort(request)

    def _preempt(self, entry: Entry) -> None:
        self.settle(entry)
        super()._preempt(entry)

    def _start_decoding(self, entries: list[Entry]) -> None:
        super()._start_decoding(entries)
        for entry in entries:
            request = entry.request
            self.left[entry.slot] = self._length(request) - len(request.tokens)
            self.lag[entry.slot] = 0
            self.carried[entry.slot] = request in self._resumed

    def _length(self, request: Request) -> int:
        own = self._lengths(request) if request.eos_token_ids else request.max_response_tokens
        return min(max(own, 1), request.max_response_tokens)

    def _next_token(self, request: Request) -> int:
        ends = request.eos_token_ids and len(request.tokens) + 1 >= self._lengths(request)
        return request.eos_token_ids[0] if ends else _plain_token(request)

    def _count(self, slots: np.ndarray, steps: int) -> None:
        self.lag[slots] += steps
        self.left[slots] -= steps


class SkippingEngine(BatchingEngine):
    """An `Engine` for simulation: `step()` runs every quiet step and then the one in which something happens.

    `lengths(request)`: the response's length, its end-of-sequence token included (at least 1); the cap still cuts it.
    The rows of all steps go to `trace`; `last_step` is the last of them, with the decode tokens and milliseconds of
    the whole call. `clock_ms` is the time simulated so far; `collection` counts the pauses.
    """

    def __init__(
        self,
        lengths: Callable[[Request], int],
        *,
        slots: int,
        pages: int,
        step_tokens: int = 8192,
        workspace_tokens: int = 32768,
        max_prompt_tokens: int = 1024,
        bytes_per_page: int = 1,
        cost: Cost = one_step,
        trace: Trace | None = None,
        replica: int = 0,
    ):
        limits = Limits(slots, step_tokens, workspace_tokens, max_prompt_tokens)
        self.scheduler: CountingScheduler
        super().__init__(CountingScheduler(PageCount(pages), limits, lengths), bytes_per_page=bytes_per_page)
        self.clock_ms = 0.0
        self.collection = 0
        self._cost = cost
        self._recorder = None if trace is None else Recorder(trace, replica)
        self._quiet: np.ndarray | None = None  # milliseconds of the coming quiet steps, until something changes

    @classmethod
    def within(cls, rollout: RolloutConfig, lengths: Callable[[Request], int], **given) -> "SkippingEngine":
        """The simulated engine with an engine's limits; `given` as in `SkippingEngine`."""
        return cls(
            lengths, slots=rollout.max_active_requests, pages=rollout.cache_pages, step_tokens=rollout.step_tokens,
            workspace_tokens=rollout.workspace_tokens, max_prompt_tokens=rollout.max_prompt_tokens, **given,
        )  # fmt: skip

    @property
    def next_event_ms(self) -> float:
        """When the next step in which something happens begins; infinite with nothing to do."""
        return self.clock_ms + float(self._quiet_ms().sum()) if self.has_unfinished else float("inf")

    def add(self, request: Request) -> None:
        self._quiet = None
        super().add(request)

    def abort(self, request: Request) -> None:
        self._quiet = None
        super().abort(request)

    def step(self) -> list[Request]:
        began = self.clock_ms
        quiet_tokens = self._grow(self._quiet_ms())
        finished = super().step()
        step = self.last_step
        shape = (step.active_requests, step.context_tokens, step.prefill_tokens)
        milliseconds = float(self._cost(*(np.array([value]) for value in shape))[0])
        self.clock_ms += milliseconds
        self._quiet = None
        if self._recorder is not None:
            self._recorder.event(replace(step, step_ms=milliseconds), self.scheduler.carried_context)
        self.last_step = replace(step, decode_tokens=step.decode_tokens + quiet_tokens, step_ms=self.clock_ms - began)
        return finished

    def run_quietly_until(self, time_ms: float) -> None:
        """Run the quiet steps that begin before `time_ms`: what a replica does while another one meets the quota."""
        milliseconds = self._quiet_ms()
        starts = self.clock_ms + np.cumsum(milliseconds) - milliseconds
        self._grow(milliseconds[: np.searchsorted(starts, time_ms)])

    def pause(self) -> list[Request]:
        """Also ends the collection interval: its rows go to the trace."""
        paused = super().pause()
        self._quiet = None
        if self._recorder is not None:
            self._recorder.flush(self.collection, self.policy_version, self.bytes_per_page)
        self.collection += 1
        return paused

    def update_weights(self, named_tensors: object = (), version: int | None = None) -> None:
        """Move to the next policy version (or `version`); there are no weights. Raises with anything resident."""
        version = self.policy_version + 1 if version is None else version
        self._begin_version(version)
        self.policy_version = self.scheduler.version = version

    def _launch(self, plan: StepPlan) -> tuple[list[int], list[float]]:
        return [], []  # the counting scheduler writes the tokens itself

    def _quiet_ms(self) -> np.ndarray:
        if self._quiet is None:
            steps = self.scheduler.quiet_steps()
            rows, context, _ = self.scheduler.decode_state()
            contexts = context + rows * np.arange(steps)
            self._quiet = self._cost(np.full(steps, rows), contexts, np.zeros(steps, dtype=np.int64))
        return self._quiet

    def _grow(self, milliseconds: np.ndarray) -> int:
        """Run that many quiet steps; returns the tokens sampled."""
        steps = len(milliseconds)
        if steps == 0:
            return 0
        scheduler = self.scheduler
        rows, context, carried = scheduler.decode_state()
        if self._recorder is not None:
            used_pages = scheduler.used_pages + np.cumsum(scheduler.new_pages(steps))
            resumed = len(scheduler.carried_rows())
            self._recorder.quiet(rows, context, resumed, carried, used_pages, milliseconds)
        scheduler.grow(steps)
        self.steps += steps
        self.clock_ms += float(milliseconds.sum())
        self._quiet = None
        return rows * steps


def _plain_token(request: Request) -> int:
    """A token that does not end the response."""
    return 0 if 0 not in request.eos_token_ids else max(request.eos_token_ids) + 1
