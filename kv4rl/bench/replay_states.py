"""Which decode states are replayed: Table A3's uniform shapes, and heterogeneous vectors as those of §B.5."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv4rl.bench.refusals import MOST_AT_ONCE
from kv4rl.config import require
from kv4rl.paper import REPLAY_SHAPES
from kv4rl.rollout.fits import PROMPTS, fit
from kv4rl.theory.lengths import LengthDistribution

MOST_TOKENS = 1 << 30  # of a context


@dataclass(frozen=True)
class State:
    """Requests that decode together: context tokens of each, the token being written included."""

    group: str  # what it is aggregated with: "4B-300", "ragged-4B"
    contexts: tuple[int, ...]

    @property
    def name(self) -> str:
        """Batch and (mean) context, e.g. "640x874"."""
        return f"{len(self.contexts)}x{round(sum(self.contexts) / len(self.contexts))}"


def parse_shapes(shapes: Sequence[str]) -> list[tuple[int, int]]:
    """(batch, context) of each "640x874"; raises ValueError for anything else."""
    pairs = [shape.split("x") for shape in shapes]
    ok = all(len(pair) == 2 and all(part.isdecimal() and int(part) > 0 for part in pair) for pair in pairs)
    require(ok, "shapes", list(shapes), "batch x context, e.g. 640x874")
    found = [(int(batch), int(context)) for batch, context in pairs]
    small = all(batch <= MOST_AT_ONCE and context <= MOST_TOKENS for batch, context in found)
    require(small, "shapes", list(shapes), f"batches of at most {MOST_AT_ONCE}, contexts of at most {MOST_TOKENS}")
    return found


def uniform(group: str, batch: int, context: int) -> State:
    require(batch >= 1 and context >= 1, "shape", f"{batch}x{context}", "at least 1x1")
    return State(group, (context,) * batch)


def table_a3(size: str) -> list[State]:
    """The fifteen states of one model, "4b" or "8b", five a checkpoint (Table A3)."""
    return [
        uniform(name, *shape)
        for name, shapes in REPLAY_SHAPES.items()
        if name.lower().startswith(size)
        for shape in shapes
    ]


# (vectors, fit of the lengths, active requests from … to, mean context from … to), as published in §B.5.
HETEROGENEOUS = {
    "4b": (24, "4B-300", (407, 475), (1400, 1700)),
    "8b": (11, "8B-250", (260, 374), (3300, 4700)),
}


def heterogeneous(size: str, seed: int = 43) -> list[State]:
    """Vectors with the counts and ranges of §B.5, each drawn from the law of an occupied slot.

    The paper's own vectors are not published. A slot's request has a length-biased length and a uniform age (A5);
    each vector is scaled to its mean context. Larger batches have shorter contexts, as pages bound their product.
    """
    count, name, rows, means = HETEROGENEOUS[size]
    rng, lengths = np.random.default_rng(seed), fit(name).lengths
    batches = np.linspace(rows[1], rows[0], count).round().astype(int)
    states = []
    for batch, mean in zip(batches, np.linspace(*means, count), strict=True):
        drawn = occupied_contexts(lengths, PROMPTS, int(batch), rng)
        scaled = np.maximum(1, (drawn * (mean / drawn.mean())).round()).astype(int)
        states.append(State(f"ragged-{size.upper()}", tuple(scaled.tolist())))
    return states


def occupied_contexts(
    lengths: LengthDistribution, prompts: LengthDistribution, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Contexts of `count` occupied slots: prompt, plus an age uniform on 0 … l - 1 of a length-biased l (A5)."""
    biased = lengths.support * lengths.probabilities
    drawn = rng.choice(lengths.support, size=count, p=biased / biased.sum())
    return prompts.sample(count, rng) + np.floor(rng.random(count) * drawn).astype(np.int64) + 1


def aggregate(baseline_ms: Sequence[float], own_ms: Sequence[float]) -> float:
    """Eq. A2: the harmonic mean of state speedups, each state with equal weight in BF16 time."""
    require(len(baseline_ms) == len(own_ms) > 0, "states", (len(baseline_ms), len(own_ms)), "as many of both, not none")
    return len(own_ms) / sum(own / base for own, base in zip(own_ms, baseline_ms, strict=True))


def ragged_aggregate(baseline_ms: Sequence[float], own_ms: Sequence[float]) -> float:
    """§B.5: summed BF16 time over summed own time (medians per state)."""
    require(len(baseline_ms) == len(own_ms) > 0, "states", (len(baseline_ms), len(own_ms)), "as many of both, not none")
    return sum(baseline_ms) / sum(own_ms)
