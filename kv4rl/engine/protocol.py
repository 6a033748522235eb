"""What a collector may use of an engine: small enough that a model-free twin drives the same collectors."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kv4rl.engine.request import Request


@dataclass(frozen=True)
class StepStats:
    """What one engine step did; the quantities of §4 carry the paper's names in brackets."""

    kind: str  # "decode", "prefill", "mixed" or "idle"
    active_requests: int  # decode rows [B_t]
    context_tokens: int  # sum of l_i over the decode rows, each with the token written in this step
    resident_kv_bytes: int  # V_t: main-cache bytes of the decode rows' contexts, nominal (no page rounding, no prefill)
    prefill_tokens: int
    decode_tokens: int
    used_pages: int  # pages held while the step ran
    preemptions: int  # requests that lost their pages in this step
    step_ms: float  # wall clock, or what a simulator's cost model says
    device_ms: float | None = None  # model and sampling alone: between two CUDA events, or on the CPU's clock


@runtime_checkable
class Engine(Protocol):
    """Continuous batching of requests under one policy version (§A.2)."""

    policy_version: int
    last_step: StepStats | None  # of the latest step()

    def add(self, request: Request) -> None:
        """Queue a request, new or carried. Raises `ValueError`, naming both numbers, if it can never fit."""

    def step(self) -> list[Request]:
        """One scheduling step; returns the requests that finished in it, each exactly once, never aborted ones."""

    def abort(self, request: Request) -> None:
        """End a request in any state; keeps everything generated. A finished request stays as it is."""

    def pause(self) -> list[Request]:
        """Evict every unfinished request, in priority order, and forget it: pages and slots freed, tokens and
        `sampler_logp` kept, status WAITING. `add` it again to go on."""

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has work."""
