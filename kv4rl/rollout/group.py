"""Prompts and their groups of sibling responses: the unit GRPO trains on and the collectors count (§3)."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv4rl.config import require
from kv4rl.engine.request import Request
from kv4rl.rewards.grader import Verdict


@dataclass(frozen=True)
class Prompt:
    """One task as token ids. `prompt_id` names it over the whole run: the sampling noise is keyed by it."""

    prompt_id: str
    tokens: list[int]
    answer: str  # the gold answer, as the grader reads it
    text: str = ""


class PromptStream(Protocol):
    """Where prompts come from. `next` raises `StopIteration` when there are no more."""

    def next(self) -> Prompt: ...

    def state(self) -> dict: ...

    def load_state(self, state: dict) -> None: ...


class ListStream:
    """The prompts of a list, once and in order; the plainest `PromptStream`."""

    def __init__(self, prompts: Sequence[Prompt]):
        self._prompts = list(prompts)
        self._cursor = 0

    def next(self) -> Prompt:
        if self._cursor == len(self._prompts):
            raise StopIteration
        self._cursor += 1
        return self._prompts[self._cursor - 1]

    def state(self) -> dict:
        return {"cursor": self._cursor}

    def load_state(self, state: dict) -> None:
        cursor = state["cursor"]
        require(0 <= cursor <= len(self._prompts), "cursor", cursor, f"within a list of {len(self._prompts)} prompts")
        self._cursor = cursor


@dataclass(eq=False)
class PromptGroup:
    """G sibling responses to one prompt (§3): complete when all of them have finished.

    `scores[i]` and `verdicts[i]` belong to `requests[i]`; the grading hook writes them.
    """

    prompt: Prompt
    requests: list[Request]
    order: int  # creation index, over the whole run: lower is older
    scores: list[float | None] = field(default_factory=list)
    verdicts: list[Verdict | None] = field(default_factory=list)
    graded: list[bool] = field(default_factory=list)  # counted as finished, and seen by the hook if there is one

    def __post_init__(self):
        for name in ("scores", "verdicts", "graded"):
            if not getattr(self, name):
                setattr(self, name, [False if name == "graded" else None] * len(self.requests))
            given = len(getattr(self, name))
            require(given == len(self.requests), name, given, f"one entry for each of {len(self.requests)} responses")

    @property
    def complete(self) -> bool:
        """Have all G responses finished, and been graded if there is a hook?"""
        return all(self.graded)

    @property
    def first_version(self) -> int | None:
        """`policy_version` at which the group's first token was sampled; None before there is one."""
        return min((request.versions[0] for request in self.requests if request.versions), default=None)

    def age(self, policy_version: int) -> int:
        """Policy updates since the group's first token was sampled; 0 before there is one."""
        first = self.first_version
        return 0 if first is None else policy_version - first

    def to_state(self) -> dict:
        """Plain data for a checkpoint."""
        return {
            "prompt": dataclasses.asdict(self.prompt),
            "requests": [request.to_state() for request in self.requests],
            "order": self.order,
            "scores": list(self.scores),
            "verdicts": [None if v is None else dataclasses.asdict(v) for v in self.verdicts],
            "graded": list(self.graded),
        }

    @classmethod
    def from_state(cls, state: dict) -> "PromptGroup":
        requests = [Request.from_state(entry) for entry in state["requests"]]
        verdicts = [None if entry is None else Verdict(**entry) for entry in state["verdicts"]]
        rest = {name: list(state[name]) for name in ("scores", "graded")}
        return cls(Prompt(**state["prompt"]), requests, state["order"], verdicts=verdicts, **rest)
