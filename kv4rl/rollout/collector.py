"""What both collectors share: the pool of prompt groups, the engine loop, grading, checkpoints."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from kv4rl.config import RolloutConfig, require
from kv4rl.engine.protocol import Engine
from kv4rl.engine.request import Request, RequestStatus
from kv4rl.rollout.group import Prompt, PromptGroup, PromptStream
from kv4rl.rollout.trace import Trace

Grade = Callable[[PromptGroup, Request], None]


class PromptsExhausted(ValueError):
    """The prompt stream ended before the pool was full."""


@dataclass
class CollectionStats:
    """One collection interval in figures. "Carried": resumed from, or left for, another interval."""

    collection: int  # index over the run, from 0
    policy_version: int
    new_groups: int = 0
    carried_requests: int = 0  # responses resumed with a prefix
    carried_tokens: int = 0  # response tokens of those prefixes, to be re-prefilled
    finished_responses: int = 0
    steps: int = 0
    decode_steps: int = 0  # pure-decode engine steps
    wait_steps: int = 0  # steps after T groups were complete, for a group at the age limit
    decode_tokens: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    trained_ages: tuple[int, ...] = ()  # age of each returned group, oldest group first
    left_complete_groups: int = 0
    left_unfinished_groups: int = 0
    left_tokens: int = 0  # response tokens of unfinished responses that stay in the pool
    left_max_age: int = 0  # largest age among the groups that stay
    collection_s: float = field(default=0.0, compare=False)


@dataclass
class Collection:
    """The T groups to train on, oldest first, and the figures of the interval."""

    groups: list[PromptGroup]
    stats: CollectionStats


class Collector(ABC):
    """Base of `SyncCollector` and `PartialCollector`, which say how large the pool is and when to stop.

    `grade(group, request)` is called once for each finished (or aborted) response, as soon as it has finished, and
    never again, not after a resume either; it writes `group.scores[request.sibling]` then, or at the latest before
    `state()`. After `collect` the engine holds nothing, also when it raised: the pool keeps every token.
    """

    name = ""

    def __init__(
        self,
        engine: Engine,
        prompts: PromptStream,
        config: RolloutConfig,
        *,
        grade: Grade | None,
        eos_token_ids: tuple[int, ...],
        trace: Trace | None = None,
    ):
        self.engine = engine
        self.config = config
        self.trace = trace
        self._prompts = prompts
        self._grade = grade
        self._eos_token_ids = tuple(eos_token_ids)
        self._pool: list[PromptGroup] = []  # oldest first
        self._next_order = 0
        self._collections = 0
        self._open: dict[tuple[str, int], PromptGroup] = {}  # responses not yet counted as finished, with their group
        self._complete = 0  # complete groups in the pool
        self._carried: list[Request] = []  # responses resumed in this collection with a prefix

    @property
    def pool(self) -> tuple[PromptGroup, ...]:
        """The groups held between collections, oldest first."""
        return tuple(self._pool)

    @property
    @abstractmethod
    def pool_groups(self) -> int:
        """Groups in the pool when a collection starts."""

    @abstractmethod
    def may_stop(self) -> bool:
        """Does the rule of this collector allow the collection to stop now?"""

    def collect(self) -> Collection:
        """Run the engine until the rule is met; take the oldest T complete groups out of the pool.

        Raises `PromptsExhausted` if the stream ends first, `ValueError` if the engine's policy is older than a token of
        the pool. The engine is paused in any case; the pool keeps what it has.
        """
        started = time.perf_counter()
        version = self.engine.policy_version
        newest = max((r.versions[-1] for g in self._pool for r in g.requests if r.versions), default=version)
        require(newest <= version, "engine.policy_version", version, f"at least {newest}, the pool's newest token")
        stats = CollectionStats(self._collections, version)
        self._top_up(stats)
        self._index()
        self._sweep()
        try:
            if not self.may_stop():
                self._submit(stats)
            while not self.may_stop():
                self._step(stats)
        finally:
            self.engine.pause()
        groups = self._take(stats)
        self._collections += 1
        stats.collection_s = time.perf_counter() - started
        return Collection(groups, stats)

    def abort(self, request: Request) -> None:
        """Give up on one response of the pool: it counts as finished with the tokens it has, and is graded.

        Raises `ValueError` for any other request.
        """
        known = _key(request) in self._open and not request.finished
        require(known, "request", _key(request), "an unfinished response of the pool")
        self.engine.abort(request)
        self._finish(request)

    def state(self) -> dict:
        """Plain data from which `load_state` continues exactly: pool, prompt cursor, counters, settings.

        Raises `ValueError` where a graded response still waits for its score: it would be lost.
        """
        for group in self._pool if self._grade is not None else ():
            for request, graded, score in zip(group.requests, group.graded, group.scores, strict=True):
                expected = "the score that the grading hook was asked for, before a checkpoint is made"
                require(score is not None or not graded, f"score of {request.label}", score, expected)
        return {
            "settings": self._settings(),
            "next_order": self._next_order,
            "collections": self._collections,
            "groups": [group.to_state() for group in self._pool],
            "prompts": self._prompts.state(),
        }

    def load_state(self, state: dict) -> None:
        """Continue from `state()`. Raises `ValueError` for the state of other settings; changes nothing then."""
        for name, value in self._settings().items():
            saved = state["settings"].get(name)
            require(saved == value, name, value, f"{saved!r}, with which the checkpoint was made")
        groups = [PromptGroup.from_state(entry) for entry in state["groups"]]
        self._prompts.load_state(state["prompts"])
        self._pool = groups
        self._next_order = state["next_order"]
        self._collections = state["collections"]
        self._index()

    def _settings(self) -> dict:
        names = ("groups_per_update", "responses_per_group", "oversubscription", "age_limit", "max_response_tokens")
        return {"collector": self.name} | {name: getattr(self.config, name) for name in names}

    def _top_up(self, stats: CollectionStats) -> None:
        """Fill the pool from the prompt stream. A prompt that was drawn is in the pool, whatever happens next."""
        wanted = self.pool_groups - len(self._pool)
        held = {group.prompt.prompt_id for group in self._pool}
        for drawn in range(wanted):
            try:
                prompt = self._prompts.next()
            except StopIteration:
                raise PromptsExhausted(
                    f"prompts: the stream ended after {drawn} of {wanted} new prompts wanted for a pool of "
                    f"{self.pool_groups} groups"
                ) from None
            require(prompt.prompt_id not in held, "prompt_id", prompt.prompt_id, "an id that is not in the pool yet")
            held.add(prompt.prompt_id)
            self._pool.append(self._new_group(prompt))
            stats.new_groups += 1

    def _new_group(self, prompt: Prompt) -> PromptGroup:
        limit, given = self.config.max_prompt_tokens, len(prompt.tokens)
        require(1 <= given <= limit, f"tokens of prompt {prompt.prompt_id!r}", given, f"1 to max_prompt_tokens={limit}")
        requests = [
            Request(
                prompt_id=prompt.prompt_id,
                sibling=sibling,
                prompt_tokens=list(prompt.tokens),
                max_response_tokens=self.config.max_response_tokens,
                eos_token_ids=self._eos_token_ids,
            )
            for sibling in range(self.config.responses_per_group)
        ]
        self._next_order += 1
        return PromptGroup(prompt, requests, order=self._next_order - 1)

    def _index(self) -> None:
        """Rebuild the look-ups from the pool."""
        self._open = {
            _key(request): group
            for group in self._pool
            for request, graded in zip(group.requests, group.graded, strict=True)
            if not graded
        }
        self._complete = sum(group.complete for group in self._pool)

    def _submit(self, stats: CollectionStats) -> None:
        """Hand every unfinished response to the engine: resumed prefixes first, and the oldest group first."""
        waiting = [r for group in self._pool for r in group.requests if not r.finished]
        for request in waiting:
            request.priority = (0 if request.tokens else 1, self._open[_key(request)].order, request.sibling)
        self._carried = [request for request in waiting if request.tokens]
        stats.carried_requests = len(self._carried)
        stats.carried_tokens = sum(len(request.tokens) for request in self._carried)
        for request in sorted(waiting, key=lambda r: r.priority):
            self.engine.add(request)

    def _step(self, stats: CollectionStats) -> None:
        waiting_for_age = self._complete >= self.config.groups_per_update
        carried = self._carried_contexts() if self.trace is not None else []
        finished = self.engine.step()
        step = self.engine.last_step
        stats.steps += 1
        stats.decode_steps += step.kind == "decode"
        stats.wait_steps += waiting_for_age
        stats.decode_tokens += step.decode_tokens
        stats.prefill_tokens += step.prefill_tokens
        stats.preemptions += step.preemptions
        if self.trace is not None:
            self.trace.record(
                step,
                collection=self._collections,
                policy_version=stats.policy_version,
                # A row that decoded grew by its token; a request preempted in this step did not decode.
                carried_context_tokens=sum(context for r, context in carried if r.context_tokens > context),
            )
        for request in finished:
            self._finish(request)
            stats.finished_responses += 1
        if not self.engine.has_unfinished:
            self._sweep()
            if self._open:
                raise RuntimeError(f"the engine holds no request, but {len(self._open)} responses are unfinished")

    def _carried_contexts(self) -> list[tuple[Request, int]]:
        return [(r, r.context_tokens) for r in self._carried if r.status is RequestStatus.DECODING]

    def _sweep(self) -> None:
        """Count responses that were aborted on the engine, behind the collector's back."""
        for key, group in list(self._open.items()):
            request = group.requests[key[1]]
            if request.finished and key in self._open:  # a grading hook may have aborted and counted it meanwhile
                self._finish(request)

    def _finish(self, request: Request) -> None:
        """Count one finished response and have it graded. A hook that raises sees the response again next time."""
        group = self._open.get(_key(request))
        if group is None:
            raise RuntimeError(f"response {_key(request)} finished twice, or is not of this pool")
        if self._grade is not None:
            self._grade(group, request)
        group.graded[request.sibling] = True
        del self._open[_key(request)]
        self._complete += group.complete

    def _take(self, stats: CollectionStats) -> list[PromptGroup]:
        """Remove the oldest T complete groups from the pool, and describe what stays."""
        complete = [group for group in self._pool if group.complete]
        taken = complete[: self.config.groups_per_update]
        self._pool = [group for group in self._pool if group not in taken]
        self._complete = len(complete) - len(taken)
        version = stats.policy_version
        stats.trained_ages = tuple(group.age(version) for group in taken)
        stats.left_complete_groups = self._complete
        stats.left_unfinished_groups = len(self._pool) - self._complete
        stats.left_tokens = sum(len(r.tokens) for g in self._pool for r in g.requests if not r.finished)
        stats.left_max_age = max((group.age(version) for group in self._pool), default=0)
        return taken


def _key(request: Request) -> tuple[str, int]:
    return request.prompt_id, request.sibling
