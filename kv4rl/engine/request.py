"""One response being decoded: its tokens, the log-probability each was sampled with, and where it stands."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from kv4rl.config import require, require_integer


class RequestStatus(StrEnum):
    """Where a request stands; every unfinished status can be aborted."""

    WAITING = "waiting"  # holds nothing: not started, or carried over a policy update
    PREFILLING = "prefilling"  # holds a slot, pages and workspace; its prefix is being computed
    DECODING = "decoding"  # holds a slot and pages; one token a step
    PREEMPTED = "preempted"  # holds nothing: gave its pages to a request of higher priority
    FINISHED = "finished"  # end-of-sequence token sampled, or cap reached
    ABORTED = "aborted"


def token_ids(value: object, name: str) -> list[int]:
    """A list, tuple, array or tensor of token ids as a list of ints; ValueError, naming it, for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    whole = isinstance(value, list | tuple) and all(type(token) is int for token in value)
    shown = value if isinstance(value, str | int) or whole else f"{type(value).__name__} {str(value)[:60]}"
    require(whole, name, shown, "a list of token ids: tokenizer(text)['input_ids'] makes one")
    return list(value)


@dataclass(eq=False)
class Request:
    """A response under way (§A.1). Preemption, pauses and policy updates never change what `append` recorded.

    `max_response_tokens` is the cap over all collection intervals together. `priority` orders admission and
    preemption: a lower tuple of numbers runs first and is preempted last; set it before the engine's `add`.
    """

    prompt_id: str
    sibling: int
    prompt_tokens: list[int]
    max_response_tokens: int
    eos_token_ids: tuple[int, ...]
    priority: tuple = ()
    tokens: list[int] = field(default_factory=list)
    sampler_logp: list[float] = field(default_factory=list)  # natural log, at the moment of sampling
    versions: list[int] = field(default_factory=list)  # policy_version that sampled each token
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None  # None, "eos", "length" or "abort"
    preemptions: int = 0

    def __post_init__(self):
        require(isinstance(self.prompt_id, str), "prompt_id", self.prompt_id, "a string")
        require_integer(self.sibling, "sibling", 0)
        require_integer(self.max_response_tokens, "max_response_tokens", 0)
        self.prompt_tokens = token_ids(self.prompt_tokens, f"prompt_tokens of {self.label}")
        self.eos_token_ids = tuple(token_ids(self.eos_token_ids, f"eos_token_ids of {self.label}"))

    @property
    def context_tokens(self) -> int:
        """Prompt and response tokens known so far."""
        return len(self.prompt_tokens) + len(self.tokens)

    @property
    def remaining_tokens(self) -> int:
        """Tokens it may still sample: cap minus everything generated, in whichever interval."""
        return self.max_response_tokens - len(self.tokens)

    @property
    def finished(self) -> bool:
        """Nothing more will be sampled: end of sequence, cap or abort."""
        return self.finish_reason is not None

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Prompt and response tokens at positions [start, stop): what a prefill computes K/V for."""
        prompt = len(self.prompt_tokens)
        return self.prompt_tokens[start:stop] + self.tokens[max(start - prompt, 0) : max(stop - prompt, 0)]

    def append(self, token: int, logp: float, version: int) -> None:
        """Record one sampled token; finishes the request at its end-of-sequence token or its cap.

        Raises `RuntimeError` on a finished request or arrays of unequal length, `ValueError` on a log-probability
        that is not finite.
        """
        if self.finish_reason is not None:
            raise RuntimeError(f"{self.label} has finished ({self.finish_reason}) and takes no more tokens")
        count = len(self.tokens)
        if not count == len(self.sampler_logp) == len(self.versions):
            raise RuntimeError(f"{self.label}: tokens, sampler_logp and versions differ in length")
        if not math.isfinite(logp):
            require(False, "sampler_logp", logp, f"a finite log-probability for {self.label}")
        self.tokens.append(token)
        self.sampler_logp.append(logp)
        self.versions.append(version)
        if token in self.eos_token_ids:
            self.finish("eos")
        elif count + 1 >= self.max_response_tokens:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End the request with everything generated kept; `reason` is "eos", "length" or "abort"."""
        self.finish_reason = reason
        self.status = RequestStatus.ABORTED if reason == "abort" else RequestStatus.FINISHED

    @property
    def label(self) -> str:
        """How errors name it."""
        return f"request {self.prompt_id!r} sibling {self.sibling}"

    def to_state(self) -> dict:
        """Plain lists and numbers, for a checkpoint; an unfinished request comes back as WAITING."""
        return {
            "prompt_id": self.prompt_id,
            "sibling": self.sibling,
            "prompt_tokens": list(self.prompt_tokens),
            "max_response_tokens": self.max_response_tokens,
            "eos_token_ids": list(self.eos_token_ids),
            "priority": list(self.priority),
            "tokens": list(self.tokens),
            "sampler_logp": list(self.sampler_logp),
            "versions": list(self.versions),
            "finish_reason": self.finish_reason,
            "preemptions": self.preemptions,
        }

    @classmethod
    def from_state(cls, state: dict) -> "Request":
        """The request `to_state` described, holding no slot and no pages."""
        fields = dict(state, eos_token_ids=tuple(state["eos_token_ids"]), priority=tuple(state["priority"]))
        lengths = [len(fields[name]) for name in ("tokens", "sampler_logp", "versions")]
        require(len(set(lengths)) == 1, "tokens, sampler_logp, versions", lengths, "one length for all three")
        for name in ("prompt_tokens", "tokens", "sampler_logp", "versions"):
            fields[name] = list(fields[name])
        request = cls(**fields)
        if request.finish_reason is not None:
            request.finish(request.finish_reason)
        return request
