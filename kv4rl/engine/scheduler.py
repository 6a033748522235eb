"""Continuous batching without a model: who runs in the next step, and who gives pages up (§A.1, §A.2).

Both engines, the real one and its model-free twin, drive this one class: `schedule` plans a step and `commit`
records what it sampled. Order is (priority, arrival); the first unfinished request in that order is never preempted
while another holds a page and nobody overtakes it in the queue, so every request ends.
"""

from bisect import insort
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from kv4rl.cache.main_cache import pages_for
from kv4rl.cache.page_allocator import PageAllocator
from kv4rl.config import PAGE_TOKENS, require
from kv4rl.engine.page_table import PageTable
from kv4rl.engine.request import Request, RequestStatus


@dataclass(frozen=True)
class Limits:
    """What bounds the requests that hold memory at the same time."""

    slots: int  # requests
    step_tokens: int  # tokens of one step: a decode row is one, prefill chunks share the rest
    workspace_tokens: int  # prefix tokens whose unquantised K/V is kept while their prefill is under way
    max_prompt_tokens: int

    def __post_init__(self):
        for name in ("slots", "workspace_tokens", "max_prompt_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "an integer >= 1")
        expected = f"at least max_active_requests ({self.slots}), so that every decoding request moves in every step"
        require(self.step_tokens >= self.slots, "step_tokens", self.step_tokens, expected)


@dataclass(eq=False)
class Entry:
    """A request inside the scheduler. `slot` is -1 while it waits."""

    request: Request
    order: tuple  # (priority, arrival)
    slot: int = -1
    prefix_tokens: int = 0  # prompt and carried tokens a prefill has to compute; 0 while it waits
    computed: int = 0  # of these, how many are in the cache
    workspace: object = None  # the engine's K/V of the prefix; dropped with the prefill that needs it


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of one request's prefix, computed in one step."""

    entry: Entry
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether the prefix is complete after it, so that its last logits give the next token."""
        return self.stop == self.entry.prefix_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step: decode rows first, then prefill chunks; `sampled` are the entries that get a token, in this order.

    `previous` int64 of the decode rows, if the step was planned ahead: the row of the step before in which each of
    them gets the token that this step writes.
    """

    decode: list[Entry]
    slots: np.ndarray  # int64, of the decode rows
    chunks: list[Chunk]
    sampled: list[Entry]
    preemptions: int
    previous: np.ndarray | None = None

    @property
    def lead(self) -> int:
        """Tokens that the rows have beyond those recorded: 1 in a step planned ahead."""
        return 0 if self.previous is None else 1

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def kind(self) -> str:
        """ "decode", "prefill", "mixed" or "idle"."""
        if self.decode:
            return "mixed" if self.chunks else "decode"
        return "prefill" if self.chunks else "idle"


class Scheduler:
    """Admission by slots, pages and workspace; chunked prefill; preemption of the lowest priority.

    `table` holds the pages of each slot. A request is admitted when its prefix fits and one page per resident
    request stays free: each of them then has 16 steps before anybody must be preempted.
    """

    def __init__(self, allocator: PageAllocator, limits: Limits):
        self.allocator = allocator
        self.limits = limits
        self.table = PageTable(limits.slots)
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._entries: dict[Request, Entry] = {}  # every unfinished request
        self._waiting: list[Entry] = []  # sorted by order
        self._prefilling: list[Entry] = []
        self._decoding: list[Entry] = []
        self._slots = np.zeros(0, dtype=np.int64)  # of self._decoding
        self._complete: list[Request] = []  # nothing left to sample when they were added
        self._arrivals = 0
        self._workspace_used = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._entries)

    @property
    def unfinished(self) -> list[Request]:
        """Every request that was added and neither returned nor taken out, in order of arrival."""
        return list(self._entries)

    @property
    def num_resident(self) -> int:
        """Requests that hold a slot and pages."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def used_pages(self) -> int:
        return self.allocator.num_pages - self.allocator.num_free

    @property
    def workspace_used(self) -> int:
        """Prefix tokens of the requests whose prefill is under way."""
        return self._workspace_used

    def check_fits(self, request: Request) -> None:
        """Raise `ValueError`, naming both numbers, if the request could not run to its cap alone."""
        prompt, cap = len(request.prompt_tokens), request.max_response_tokens
        require(prompt >= 1, "prompt_tokens", request.prompt_tokens, f"at least one token in {request.label}")
        limit = self.limits.max_prompt_tokens
        require(prompt <= limit, "prompt_tokens", prompt, f"at most max_prompt_tokens={limit} in {request.label}")
        wanted, have = pages_for(prompt + cap), self.allocator.num_pages
        expected = f"at most the {have} pages of the pool: {request.label} has {prompt} prompt tokens and cap {cap}"
        require(wanted <= have, "pages", wanted, expected)
        # The longest prefix ever rebuilt lacks only the last token of the response.
        longest, workspace = max(prompt, prompt + cap - 1), self.limits.workspace_tokens
        expected = f"at most workspace_tokens={workspace}, or {request.label} could not be rebuilt once preempted"
        require(longest <= workspace, "prefix_tokens", longest, expected)

    def add(self, request: Request) -> None:
        """Queue a request that is WAITING (new, or carried with its tokens)."""
        if request in self._entries:
            raise ValueError(f"{request.label} is already in the engine ({request.status.value})")
        expected = f"waiting: {request.label} takes no more tokens"
        require(request.status is RequestStatus.WAITING, "status", request.status.value, expected)
        numbers = isinstance(request.priority, tuple) and all(
            isinstance(part, int | float) for part in request.priority
        )
        require(numbers, f"priority of {request.label}", request.priority, "a tuple of numbers")
        self.check_fits(request)
        entry = Entry(request, (request.priority, self._arrivals))
        self._arrivals += 1
        self._entries[request] = entry
        if request.remaining_tokens == 0:
            self._complete.append(request)
        else:
            insort(self._waiting, entry, key=attrgetter("order"))

    def schedule(self) -> StepPlan:
        """Plan one step: pages for every decode row, then prefill in what is left of the token budget.

        Nothing counts as computed before `commit`, so a step that raised can be planned again.
        """
        preemptions = self._grow_decoding()
        budget = self.limits.step_tokens - len(self._decoding)
        chunks = []
        for entry in sorted(self._prefilling, key=attrgetter("order")):
            budget -= self._add_chunk(chunks, entry, budget)
        while budget > 0 and preemptions == 0 and self._head_fits(self.num_resident, self.allocator.num_free):
            budget -= self._add_chunk(chunks, self._admit(), budget)
        sampled = self._decoding + [chunk.entry for chunk in chunks if chunk.last]
        return StepPlan(list(self._decoding), self._slots, chunks, sampled, preemptions)

    def plan_ahead(self, plan: StepPlan, ends: np.ndarray) -> StepPlan | None:
        """The step after `plan`, whose tokens are not known yet; None where they have to be awaited.

        Left out are rows whose last token is certainly that of `plan`: by their cap, or because `ends` int64 by slot
        (prompt and response tokens) says so. A row that turns out to have ended otherwise decodes once more for
        nothing (`still_held`). Awaited is a step with prefill in it, and one after which a request could be admitted
        or would have to be preempted: what is planned ahead is what would have been planned in time.
        """
        if plan.kind != "decode" or self._prefilling:
            return None
        slots, table = plan.slots, self.table
        context, held = table.context[slots] + 1, table.held[slots]
        goes_on = (held > 0) & (context < np.minimum(table.cap[slots], ends[slots]))
        rows = np.flatnonzero(goes_on)
        short = slots[goes_on & (held * PAGE_TOKENS < context)]
        free = self.allocator.num_free - len(short)
        admits = len(rows) < self.limits.step_tokens and self._head_fits(len(rows), free + int(held[~goes_on].sum()))
        if len(rows) == 0 or free < 0 or admits:
            return None
        if len(short):
            table.append(short, self.allocator.allocate(len(short)))
        entries = plan.decode if len(rows) == len(slots) else [plan.decode[row] for row in rows]
        return StepPlan(entries, slots[rows], [], entries, 0, previous=rows)

    def still_held(
        self, plan: StepPlan, tokens: list[int], logps: list[float]
    ) -> tuple[StepPlan, list[int], list[float]]:
        """What is left of a step for `commit`: without the decode rows that were given up after it was planned."""
        held = self.table.held[plan.slots] > 0
        if held.all():
            return plan, tokens, logps
        rows = np.flatnonzero(held)
        entries = [plan.decode[row] for row in rows]
        left = replace(plan, decode=entries, slots=plan.slots[rows], sampled=entries)
        return left, [tokens[row] for row in rows], [logps[row] for row in rows]

    def holds_any(self, plan: StepPlan) -> bool:
        """Whether a decode row of the plan still holds its pages."""
        return bool((self.table.held[plan.slots] > 0).any())

    def commit(self, plan: StepPlan, tokens: list[int], logps: list[float], version: int) -> list[Request]:
        """Record one sampled token per entry of `plan.sampled`; returns the requests that finished, each once."""
        for chunk in plan.chunks:
            chunk.entry.computed = chunk.stop
        for entry, token, logp in zip(plan.sampled, tokens, logps, strict=True):
            entry.request.append(token, logp, version)
        rows = len(plan.slots)
        self.table.last_token[plan.slots] = tokens[:rows]
        self.table.context[plan.slots] += 1
        self._start_decoding(plan.sampled[rows:])
        ended = [entry for entry in plan.sampled if entry.request.finish_reason is not None]
        self._release(ended)
        finished, self._complete = self._complete, []
        for request in finished:
            request.finish("length")
        finished += [entry.request for entry in ended]
        for request in finished:
            del self._entries[request]
        return finished

    def abort(self, request: Request) -> None:
        """Take a request out, whatever its state, and end it; one that has finished stays as it is."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            self._forget(entry)
        if not request.finished:
            request.finish("abort")

    def pause(self) -> list[Request]:
        """Take every unfinished request out, in order, with its tokens; status WAITING."""
        entries = sorted(self._entries.values(), key=attrgetter("order"))
        self._release([entry for entry in entries if entry.slot >= 0])
        self._entries.clear()
        self._waiting.clear()
        self._complete.clear()
        for entry in entries:
            entry.request.status = RequestStatus.WAITING
        return [entry.request for entry in entries]

    def _grow_decoding(self) -> int:
        """Give each decode row the page its next token needs, highest priority first; returns the preemptions."""
        short = self.table.short_of_page(self._slots)
        if len(short) <= self.allocator.num_free:
            if len(short):
                self.table.append(short, self.allocator.allocate(len(short)))
            return 0
        slots, preemptions = set(short.tolist()), 0
        for entry in sorted((e for e in self._decoding if e.slot in slots), key=attrgetter("order")):
            while entry.slot >= 0 and self.allocator.num_free == 0:
                self._preempt(max(self._prefilling + self._decoding, key=attrgetter("order")))
                preemptions += 1
            if entry.slot >= 0:
                self.table.append(np.array([entry.slot]), self.allocator.allocate(1))
        return preemptions

    def _preempt(self, entry: Entry) -> None:
        self._release([entry])
        entry.request.status = RequestStatus.PREEMPTED
        entry.request.preemptions += 1
        insort(self._waiting, entry, key=attrgetter("order"))

    def _head_fits(self, resident: int, free_pages: int) -> bool:
        """Whether the first waiting request can be admitted beside `resident` ones; nobody behind it is asked."""
        if not self._waiting or resident >= self.limits.slots:
            return False
        prefix = self._waiting[0].request.context_tokens
        if self._workspace_used + prefix > self.limits.workspace_tokens:
            return False
        return pages_for(prefix) + resident <= free_pages

    def _admit(self) -> Entry:
        entry = self._waiting.pop(0)
        entry.slot = self._free_slots.pop()
        entry.prefix_tokens = entry.request.context_tokens
        entry.computed = 0
        self.table.set(entry.slot, self.allocator.allocate(pages_for(entry.prefix_tokens)))
        self._workspace_used += entry.prefix_tokens
        self._prefilling.append(entry)
        entry.request.status = RequestStatus.PREFILLING
        return entry

    def _add_chunk(self, chunks: list[Chunk], entry: Entry, budget: int) -> int:
        """Plan as much of a prefix as the budget allows; returns the tokens planned."""
        tokens = min(budget, entry.prefix_tokens - entry.computed)
        if tokens > 0:
            chunks.append(Chunk(entry, entry.computed, entry.computed + tokens))
        return tokens

    def _start_decoding(self, entries: list[Entry]) -> None:
        """Move requests whose prefix is complete to the decode rows."""
        for entry in entries:
            self._end_prefill(entry)
            entry.request.status = entry.request.status if entry.request.finished else RequestStatus.DECODING
            self.table.context[entry.slot] = entry.request.context_tokens
            self.table.cap[entry.slot] = len(entry.request.prompt_tokens) + entry.request.max_response_tokens
            self.table.last_token[entry.slot] = entry.request.tokens[-1]
        if entries:
            self._set_decoding(self._decoding + entries)

    def _end_prefill(self, entry: Entry) -> None:
        self._prefilling.remove(entry)
        self._workspace_used -= entry.prefix_tokens
        entry.workspace = None

    def _set_decoding(self, entries: list[Entry]) -> None:
        self._decoding = entries
        self._slots = np.fromiter((entry.slot for entry in entries), dtype=np.int64, count=len(entries))

    def _release(self, entries: list[Entry]) -> None:
        """Free the pages, slots and workspace of resident entries and compact the decode rows."""
        if not entries:
            return
        for entry in entries:
            if entry in self._prefilling:
                self._end_prefill(entry)
            self.allocator.free(self.table.clear(entry.slot))
            self._free_slots.append(entry.slot)
            entry.slot = -1
        self._set_decoding([entry for entry in self._decoding if entry.slot >= 0])

    def _forget(self, entry: Entry) -> None:
        """Free whatever an entry holds: slot and pages, or its place in the queue."""
        if entry.slot >= 0:
            self._release([entry])
        elif entry.request in self._complete:
            self._complete.remove(entry.request)
        else:
            self._waiting.remove(entry)
