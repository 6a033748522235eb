"""The two ideal schedules of §4.1, sampled: what the exact values of `concentration` are checked against.

Each average comes with its standard error, so a check can say how far off is too far.
"""

from dataclasses import dataclass

import numpy as np

from kv4rl.config import require
from kv4rl.theory.concentration import logical_work, require_slots, slot_context
from kv4rl.theory.lengths import LengthDistribution, whole


@dataclass(frozen=True)
class Estimate:
    """A sampled average and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Waves:
    """Decode-step averages of synchronous waves (§C.3); volume in context positions over all slots."""

    volume: Estimate
    occupancy: Estimate
    context: Estimate  # every step counts the same
    slot_context: Estimate  # every occupied slot-step counts the same (A9)


@dataclass(frozen=True)
class Refill:
    """Decode-step averages of continuous refill (§C.2)."""

    volume: Estimate
    context: Estimate
    length_seen: Estimate  # length of the response in a slot at a random step: L* of A5


def simulate_waves(lengths: LengthDistribution, slots: int, prompt_tokens: int, *, waves: int, seed: int) -> Waves:
    """`waves` independent waves of `slots` responses each; cycles of the renewal-reward theorem (A3)."""
    require_slots(slots)
    require(whole(waves) and waves >= 2, "waves", waves, "an integer >= 2")
    drawn = lengths.sample((waves, slots), np.random.default_rng(seed))
    duration = drawn.max(axis=1)
    work, busy = logical_work(prompt_tokens, drawn).sum(axis=1), drawn.sum(axis=1)
    return Waves(
        volume=_ratio(work, duration),
        occupancy=_ratio(busy, duration),
        context=_ratio(logical_work(prompt_tokens, duration), duration),
        slot_context=_ratio(work, busy),
    )


def simulate_refill(lengths: LengthDistribution, slots: int, prompt_tokens: int, *, steps: int, seed: int) -> Refill:
    """Each slot starts a new response in the step after one ends; observed for `steps` steps, the last one cut.

    Errors come from the spread over slots, which are independent.
    """
    require_slots(slots, least=2)
    require(whole(steps) and steps >= 1, "steps", steps, "an integer >= 1")
    rng = np.random.default_rng(seed)
    context, seen = np.empty(slots), np.empty(slots)
    for slot in range(slots):
        drawn = _fill(lengths, steps, rng)
        lived = drawn.copy()
        lived[-1] = steps - drawn[:-1].sum()  # the response still running at the end (Lemma C.3)
        context[slot] = logical_work(prompt_tokens, lived).sum() / steps
        seen[slot] = (lived * drawn).sum() / steps
    mean = Estimate(context.mean(), context.std(ddof=1) / slots**0.5)
    return Refill(
        volume=Estimate(slots * mean.value, slots * mean.error),
        context=mean,
        length_seen=Estimate(seen.mean(), seen.std(ddof=1) / slots**0.5),
    )


def simulate_pairs(prompts, lengths, slots: int, *, steps: int, seed: int) -> Estimate:
    """Mean context of a slot under continuous refill with pairs (P, L) as dependent as they come (Eq. A10).

    prompts, lengths: integers [n], each pair equally likely. The error comes from the spread over slots.
    """
    slot_context(prompts, lengths)  # refuses pairs that cannot be used
    require_slots(slots, least=2)
    require(whole(steps) and steps >= 1, "steps", steps, "an integer >= 1")
    prompts, lengths = np.asarray(prompts), np.asarray(lengths)
    most = int(steps // lengths.min()) + 1
    chosen = np.random.default_rng(seed).integers(len(lengths), size=(slots, most))  # [slots, responses]
    own = lengths[chosen]
    lived = np.clip(steps - (np.cumsum(own, axis=1) - own), 0, own)  # the last one is cut, those after it never begin
    context = logical_work(prompts[chosen], lived).sum(axis=1) / steps
    return Estimate(float(context.mean()), float(context.std(ddof=1) / slots**0.5))


def volume_ratio(refill: Refill, waves: Waves) -> Estimate:
    """C_KV as a quotient of two sampled volumes (Eq. 4.1); the runs must not share a seed, or the error is not this."""
    value = refill.volume.value / waves.volume.value
    relative = np.hypot(refill.volume.error / refill.volume.value, waves.volume.error / waves.volume.value)
    return Estimate(float(value), float(value * relative))


def _fill(lengths: LengthDistribution, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Just enough lengths to cover `steps`."""
    drawn = np.empty(0, dtype=np.int64)
    while drawn.sum() < steps:
        drawn = np.concatenate([drawn, lengths.sample(int(steps / lengths.mean) + 16, rng)])
    return drawn[: np.searchsorted(np.cumsum(drawn), steps) + 1]


def _ratio(reward: np.ndarray, duration: np.ndarray) -> Estimate:
    """E[R] / E[X] from independent cycles, with the delta-method error."""
    value = reward.sum() / duration.sum()
    residual = reward - value * duration
    return Estimate(float(value), float(residual.std(ddof=1) / (duration.mean() * len(duration) ** 0.5)))
