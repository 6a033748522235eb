"""Response lengths forced on a real engine, so that a frozen policy is rolled out at a stated length law (§B.3).

A random policy ends its responses where chance says. `RolloutEngine(forced_lengths=...)` takes the end-of-sequence
token out of its choice before the stated length and gives it that token there; the caller's cap still cuts. What it
takes is a function of the request: a `Workload` (siblings correlated, as the fits of `rollout/fits.py` want), or
`ForcedLengths` for independent draws and prompts with any id.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from kv4rl.config import require
from kv4rl.engine.noise import noise_key, splitmix64
from kv4rl.engine.request import Request
from kv4rl.rollout.group import Prompt
from kv4rl.rollout.workload import Workload
from kv4rl.theory.lengths import LengthDistribution


@dataclass(frozen=True)
class ForcedLengths:
    """A length per (seed, prompt id, sibling), independent draws of `lengths`: the same in every process and order."""

    lengths: LengthDistribution
    seed: int = 0

    def __call__(self, request: Request) -> int:
        """The response length of a request, its end-of-sequence token included."""
        draw = splitmix64(noise_key(self.seed, request.prompt_id, request.sibling))
        return self.lengths.quantile((draw >> 11) * 2.0**-53)


class RandomPrompts:
    """An endless `PromptStream` of a workload's prompt lengths, with token ids drawn from a vocabulary.

    The ids of prompt i depend on (workload seed, i) alone. Raises `ValueError` for a vocabulary without tokens.
    """

    def __init__(self, workload: Workload, vocab_size: int):
        require(vocab_size >= 1, "vocab_size", vocab_size, "an integer >= 1")
        self._workload, self._vocabulary, self._cursor = workload, vocab_size, 0

    def next(self) -> Prompt:
        self._cursor += 1
        return self.prompt(self._cursor - 1)

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index` of the stream."""
        count, _ = self._workload.group(index)
        ids = np.random.default_rng([self._workload.seed, index, 1]).integers(self._vocabulary, size=count)
        return Prompt(str(index), ids.tolist(), answer="")

    def state(self) -> dict:
        return {"cursor": self._cursor}

    def load_state(self, state: dict) -> None:
        self._cursor = state["cursor"]


def shrunk(workload: Workload, factor: float) -> Workload:
    """The workload with every prompt and response `factor` times shorter, rounded up: for small models and CPUs."""
    shorter = lambda law: _shrunk_law(law, factor)
    return replace(workload, lengths=shorter(workload.lengths), prompts=shorter(workload.prompts))


def _shrunk_law(law: LengthDistribution, factor: float) -> LengthDistribution:
    require(math.isfinite(factor) and factor >= 1, "factor", factor, "a finite number >= 1")
    support, place = np.unique(np.ceil(law.support / factor).astype(np.int64), return_inverse=True)
    return LengthDistribution(support, np.bincount(place, law.probabilities))
