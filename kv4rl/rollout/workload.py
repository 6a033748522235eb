"""Simulated prompts and response lengths: drawn from laws, the same ones under every schedule."""

import functools
import math
from dataclasses import dataclass

import numpy as np

from kv4rl.config import require
from kv4rl.engine.request import Request
from kv4rl.rollout.group import Prompt
from kv4rl.theory.lengths import LengthDistribution


@dataclass(frozen=True)
class Workload:
    """Response i of prompt p has length `lengths(u)` with u from (seed, p, i) alone.

    `prompt_share` in [0, 1] is the part of the variance that siblings share (hard prompts have long responses): a
    Gaussian copula, so that every single length still follows `lengths`.
    """

    lengths: LengthDistribution
    prompts: LengthDistribution
    prompt_share: float = 0.0
    seed: int = 0
    siblings: int = 8

    def __post_init__(self):
        require(0 <= self.prompt_share <= 1, "prompt_share", self.prompt_share, "a number in [0, 1]")
        require(self.siblings >= 1, "siblings", self.siblings, "an integer >= 1")

    def __call__(self, request: Request) -> int:
        """The response length of a request, its end-of-sequence token included."""
        return self.group(int(request.prompt_id))[1][request.sibling]

    def group(self, index: int) -> tuple[int, tuple[int, ...]]:
        """Prompt tokens and response lengths of prompt `index`."""
        return _draw(self, index)

    def stream(self) -> "WorkloadPrompts":
        """The endless prompt stream of this workload."""
        return WorkloadPrompts(self)


class WorkloadPrompts:
    """An endless `PromptStream`; a prompt's id is its index."""

    def __init__(self, workload: Workload):
        self._workload = workload
        self._cursor = 0

    def next(self) -> Prompt:
        tokens, _ = self._workload.group(self._cursor)
        self._cursor += 1
        return Prompt(str(self._cursor - 1), _zeros(tokens), answer="")

    def state(self) -> dict:
        return {"cursor": self._cursor}

    def load_state(self, state: dict) -> None:
        self._cursor = state["cursor"]


@functools.lru_cache(maxsize=1 << 16)
def _draw(workload: Workload, index: int) -> tuple[int, tuple[int, ...]]:
    rng = np.random.default_rng([workload.seed, index])
    shared, own = rng.standard_normal(), rng.standard_normal(workload.siblings)
    normal = math.sqrt(workload.prompt_share) * shared + math.sqrt(1 - workload.prompt_share) * own
    levels = [0.5 * math.erfc(-value / math.sqrt(2)) for value in normal.tolist()]
    lengths = tuple(workload.lengths.quantile(level) for level in levels)
    return workload.prompts.quantile(rng.random()), lengths


@functools.lru_cache(maxsize=1 << 12)
def _zeros(tokens: int) -> list[int]:
    return [0] * tokens
