"""KV concentration: Prop. 4.1 and Appendix C, as functions of a length distribution.

Time is counted in decode steps and volume in context positions; multiply a volume by kappa (bytes per position,
`roofline.kv_bytes_per_token`) to get V_t. Every value is exact for the finite law it is given, up to rounding:
E[M_B] comes from the CDF, not from samples.
"""

import math
from dataclasses import dataclass

import numpy as np

from kv4rl.config import require
from kv4rl.theory.lengths import LengthDistribution, finite, whole


def logical_work(prompt_tokens, length_tokens):
    """Q(P, L) = P L + L (L - 1) / 2 (§4.1): context positions one response reads while it decodes.

    Numbers or arrays. Raises `ValueError` for a prompt or a length below 0, NaN included.
    """
    require(bool(np.all(np.greater_equal(prompt_tokens, 0))), "prompt_tokens", prompt_tokens, "numbers >= 0")
    require(bool(np.all(np.greater_equal(length_tokens, 0))), "length_tokens", length_tokens, "numbers >= 0")
    return prompt_tokens * length_tokens + length_tokens * (length_tokens - 1) / 2


def refill_context(lengths: LengthDistribution, prompt_tokens: float = 0) -> float:
    """Mean context under continuous refill, in tokens (Eq. 4.1, A4): P + E[L(L-1)] / (2 E[L])."""
    _check_prompt(prompt_tokens)
    return prompt_tokens + (lengths.moment(2) - lengths.mean) / (2 * lengths.mean)


def refill_context_from_moments(mean: float, variance: float, prompt_tokens: float = 0) -> float:
    """The same from mu and sigma^2 (§C.2): P + (mu - 1) / 2 + sigma^2 / (2 mu).

    Raises `ValueError` for an infinite variance: the identity of Prop. 4.1 needs E[L^2] to be finite.
    """
    _check_prompt(prompt_tokens)
    require(finite(mean) and mean >= 1, "mean", mean, "a finite number >= 1")
    expected = "a finite number >= 0: Prop. 4.1 needs a finite second moment"
    require(finite(variance) and variance >= 0, "variance", variance, expected)
    return prompt_tokens + (mean - 1) / 2 + variance / (2 * mean)


def expected_max(lengths: LengthDistribution, slots: int, order: int = 1) -> float:
    """E[M_B^order] with M_B = max of `slots` independent lengths: the duration of a synchronous wave (§C.3)."""
    require_slots(slots)
    # F^B through log1p of the survival: exact where F is close to one, which is where M_B lives.
    with np.errstate(divide="ignore"):
        cdf_power = np.exp(slots * np.log1p(-lengths.survival))
    probabilities = np.diff(cdf_power, prepend=0.0)
    return float(np.dot(lengths.support.astype(np.float64) ** order, probabilities))


def kv_concentration(lengths: LengthDistribution, slots: int) -> float:
    """C_KV = V_async / V_sync = E[M_B] / E[L] >= 1 (Eq. 4.1, A8); does not depend on the prompt length."""
    return expected_max(lengths, slots) / lengths.mean


def refill_volume(lengths: LengthDistribution, slots: int, prompt_tokens: float = 0) -> float:
    """Mean resident context of continuous refill over all slots, in positions (A4 over kappa): B q / E[L]."""
    require_slots(slots)
    return slots * refill_context(lengths, prompt_tokens)


def wave_volume(lengths: LengthDistribution, slots: int, prompt_tokens: float = 0) -> float:
    """Mean resident context of synchronous waves, in positions (A6 over kappa): B q / E[M_B]."""
    _check_prompt(prompt_tokens)
    work = prompt_tokens * lengths.mean + (lengths.moment(2) - lengths.mean) / 2
    return slots * work / expected_max(lengths, slots)


def wave_occupancy(lengths: LengthDistribution, slots: int) -> float:
    """Mean active requests of synchronous waves (A7): B E[L] / E[M_B]. Continuous refill holds B."""
    require_slots(slots)
    return slots * lengths.mean / expected_max(lengths, slots)


def wave_context(lengths: LengthDistribution, slots: int, prompt_tokens: float = 0) -> float:
    """Step-averaged context of a wave (§C.3): P + (E[M_B^2] - E[M_B]) / (2 E[M_B]).

    The low-occupancy tail counts as much as the full start; weighted by slot instead (A9) the context of a wave is
    that of continuous refill, `refill_context`.
    """
    _check_prompt(prompt_tokens)
    first = expected_max(lengths, slots)
    return prompt_tokens + (expected_max(lengths, slots, order=2) - first) / (2 * first)


def length_biased(lengths: LengthDistribution) -> LengthDistribution:
    """The law of the length seen in an occupied slot (A5): Pr(L* = l) = l Pr(L = l) / mu."""
    return LengthDistribution(lengths.support, lengths.support * lengths.probabilities / lengths.mean)


def age_probabilities(lengths: LengthDistribution) -> np.ndarray:
    """Pr(age = a) for a = 0 … cap - 1 in an occupied slot (A5, summed over l): Pr(L > a) / mu. float64 [cap]."""
    dense = np.zeros(lengths.cap + 1)
    dense[lengths.support] = lengths.probabilities
    at_least = np.cumsum(dense[::-1])[::-1]  # Pr(L >= l)
    return at_least[1:] / lengths.mean


@dataclass(frozen=True)
class SlotContext:
    """The three parts of Eq. A10; their sum is the mean context of an occupied slot, in tokens."""

    prompt_mean: float  # E[P]
    prompt_bias: float  # Cov(P, L) / E[L]: long responses weigh their prompts more
    response: float  # E[L(L-1)] / (2 E[L])

    @property
    def total(self) -> float:
        return self.prompt_mean + self.prompt_bias + self.response


def slot_context(prompts, lengths, probabilities=None) -> SlotContext:
    """Slot-weighted context for pairs (P, L) (Eq. A9, A10), valid for any schedule that keeps prefixes.

    prompts, lengths: integers [n], the pairs; probabilities: [n] summing to one, or None for equally likely pairs.
    Raises `ValueError` for anything else; a pair of infinite length has no finite second moment (Prop. 4.1).
    """
    prompts, lengths = np.asarray(prompts, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    require(lengths.ndim == 1 and lengths.size > 0, "lengths", lengths, "a non-empty list")
    require(prompts.shape == lengths.shape, "prompts", prompts.shape, f"one prompt length per length, {lengths.shape}")
    for name, values, least in (("lengths", lengths, 1), ("prompts", prompts, 0)):
        integers = np.isfinite(values) & (values == np.floor(values)) & (values >= least)
        require(bool(np.all(integers)), name, values[~integers].tolist(), f"finite integers, {name} >= {least}")
    equal = np.full(lengths.shape, 1 / lengths.size)
    given = equal if probabilities is None else np.asarray(probabilities, dtype=np.float64)
    require(given.shape == lengths.shape, "probabilities", given.shape, f"shape {lengths.shape}")
    require(bool(np.all(given >= 0)), "probabilities", float(given.min()), "numbers >= 0")
    require(abs(math.fsum(given) - 1) <= 1e-9, "probabilities", math.fsum(given), "a sum of 1")
    mean, prompt_mean = float(given @ lengths), float(given @ prompts)
    covariance = float(given @ ((prompts - prompt_mean) * (lengths - mean)))
    return SlotContext(prompt_mean, covariance / mean, float(given @ (lengths * (lengths - 1))) / (2 * mean))


def require_slots(slots: int, least: int = 1) -> None:
    """Raise `ValueError` unless `slots` is a whole number of at least `least`."""
    require(whole(slots) and slots >= least, "slots", slots, f"an integer >= {least}")


def _check_prompt(prompt_tokens: float) -> None:
    require(finite(prompt_tokens) and prompt_tokens >= 0, "prompt_tokens", prompt_tokens, "a finite number >= 0")
