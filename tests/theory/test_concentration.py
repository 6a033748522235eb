"""Prop. 4.1 and Appendix C: against enumeration, closed forms, and simulation inside bands over 20 seeds."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.theory import concentration as c
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.schedules import Estimate, simulate_pairs, simulate_refill, simulate_waves, volume_ratio

SEEDS = range(20)


@st.composite
def small_laws(draw):
    support = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=4)))
    weights = np.array([draw(st.integers(1, 9)) for _ in support], dtype=float)
    return LengthDistribution(support, weights / weights.sum())


def enumerate_waves(law, slots):
    """Every outcome of one wave with its probability: the definition itself."""
    pairs = list(zip(law.support.tolist(), law.probabilities.tolist(), strict=True))
    for outcome in itertools.product(pairs, repeat=slots):
        yield [length for length, _ in outcome], np.prod([probability for _, probability in outcome])


def work_by_sum(prompt, length):
    return sum(prompt + position for position in range(length))


@settings(deadline=None, max_examples=60)
@given(small_laws(), st.integers(1, 4), st.integers(0, 5))
def test_waves_equal_their_enumeration(law, slots, prompt):
    duration = volume = occupied = context = 0.0
    for lengths, probability in enumerate_waves(law, slots):
        longest = max(lengths)
        duration += probability * longest
        volume += probability * sum(work_by_sum(prompt, length) for length in lengths)
        occupied += probability * sum(lengths)
        context += probability * work_by_sum(prompt, longest)
    assert c.expected_max(law, slots) == pytest.approx(duration, rel=1e-12)
    assert c.wave_volume(law, slots, prompt) == pytest.approx(volume / duration, rel=1e-12)
    assert c.wave_occupancy(law, slots) == pytest.approx(occupied / duration, rel=1e-12)
    assert c.wave_context(law, slots, prompt) == pytest.approx(context / duration, rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(small_laws(), st.integers(2, 2000), st.integers(0, 5000))
def test_proposition_4_1(law, slots, prompt):
    concentration = c.kv_concentration(law, slots)
    ratio = c.refill_volume(law, slots, prompt) / c.wave_volume(law, slots, prompt) if prompt or law.cap > 1 else 1.0
    assert concentration == pytest.approx(ratio, rel=1e-9)
    assert concentration >= 1 - 1e-12
    degenerate = len(law.support) == 1
    assert degenerate == (concentration == pytest.approx(1, abs=1e-12))
    assert c.kv_concentration(law, slots + 1) >= concentration * (1 - 1e-12)  # E[M_B] does not decrease in B


@settings(deadline=None, max_examples=60)
@given(small_laws(), st.integers(0, 50))
def test_the_refill_context_is_the_mean_age_of_the_length_biased_law(law, prompt):
    ages = c.age_probabilities(law)
    assert ages.sum() == pytest.approx(1, rel=1e-12)
    context = prompt + np.arange(law.cap) @ ages
    assert c.refill_context(law, prompt) == pytest.approx(context, rel=1e-12)
    assert c.refill_context_from_moments(law.mean, law.variance, prompt) == pytest.approx(context, rel=1e-12)
    biased = c.length_biased(law)
    assert prompt + biased.probabilities @ ((biased.support - 1) / 2) == pytest.approx(context, rel=1e-12)


def test_the_maximum_of_geometrics_is_a_harmonic_sum():
    law = LengthDistribution.geometric(1000.0)
    harmonic = sum(1 / k for k in range(1, 257))
    assert c.expected_max(law, 256) == pytest.approx(harmonic / -np.log1p(-1e-3) + 0.5, rel=1e-5)


def test_the_expected_maximum_keeps_its_digits_for_rare_long_responses():
    # One in a million: 1 - F^B loses nothing when it comes from log1p of the survival.
    law = LengthDistribution.bimodal(1, 1000, 1e-12)
    assert c.expected_max(law, 1000) == pytest.approx(1 + 999 * 1e-9, rel=1e-14)


def test_a_tail_that_rounds_to_more_than_one_still_has_a_maximum():
    body = LengthDistribution.lognormal(1395, 0.731, cap=16384)
    law = LengthDistribution.mixture([body, LengthDistribution.deterministic(16384)], [0.9893, 0.0107])
    never_capped = (1 - law.probabilities[-1]) ** 512
    assert (1 - never_capped) * 16384 < c.expected_max(law, 512) <= 16384


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6))
def test_variable_prompts_equal_the_ratio_of_work_to_length(pairs):
    prompts, lengths = zip(*pairs, strict=True)
    work = sum(work_by_sum(p, l) for p, l in pairs)
    parts = c.slot_context(prompts, lengths)
    assert parts.total == pytest.approx(work / sum(lengths), rel=1e-9, abs=1e-9)
    weighted = c.slot_context(prompts, lengths, np.full(len(pairs), 1 / len(pairs)))
    assert weighted.total == pytest.approx(parts.total, rel=1e-12)


def test_uncorrelated_prompts_add_their_mean():
    prompts, lengths = zip(*itertools.product([10, 30], [4, 8]), strict=True)
    parts = c.slot_context(prompts, lengths)
    assert (parts.prompt_mean, parts.prompt_bias) == (20, pytest.approx(0, abs=1e-12))


LAWS = {
    "geometric": LengthDistribution.geometric(60.0, cap=2000),
    "lognormal": LengthDistribution.lognormal(50, 0.9, cap=600),
    "bimodal": LengthDistribution.bimodal(10, 200, 0.1),
}


def inside(estimate: Estimate, exact: float) -> bool:
    return abs(estimate.value - exact) <= 4.5 * estimate.error + 1e-9 * exact


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_simulated_waves_fall_in_the_band_over_twenty_seeds(law):
    slots, prompt = 32, 20
    for seed in SEEDS:
        waves = simulate_waves(law, slots, prompt, waves=400, seed=seed)
        assert inside(waves.volume, c.wave_volume(law, slots, prompt))
        assert inside(waves.occupancy, c.wave_occupancy(law, slots))
        assert inside(waves.context, c.wave_context(law, slots, prompt))
        assert inside(waves.slot_context, c.refill_context(law, prompt))  # A9: weighted by slot they agree


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_simulated_refill_falls_in_the_band_over_twenty_seeds(law):
    slots, prompt = 32, 20
    for seed in SEEDS:
        refill = simulate_refill(law, slots, prompt, steps=20000, seed=seed)
        assert inside(refill.context, c.refill_context(law, prompt))
        assert inside(refill.volume, c.refill_volume(law, slots, prompt))
        assert inside(refill.length_seen, c.length_biased(law).mean)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_the_simulated_factor_falls_in_the_band_over_twenty_seeds(law):
    slots, prompt = 32, 20
    exact = c.kv_concentration(law, slots)
    for seed in SEEDS:
        refill = simulate_refill(law, slots, prompt, steps=20000, seed=seed)
        factor = volume_ratio(refill, simulate_waves(law, slots, prompt, waves=400, seed=seed + 1000))
        assert inside(factor, exact)
        assert not inside(factor, 1)  # the band is narrow enough to see that there is an effect


def correlated_pairs(seed, count=400):
    """Long problems, long answers: prompt lengths that follow the response lengths and a noise of their own."""
    rng = np.random.default_rng(seed)
    lengths = LAWS["lognormal"].sample(count, rng)
    return rng.integers(5, 40, count) + (rng.uniform(0.2, 0.8) * lengths).astype(int), lengths


def test_correlated_prompts_fall_in_the_band_of_a10_over_twenty_seeds():
    without_covariance = 0
    for seed in SEEDS:
        prompts, lengths = correlated_pairs(seed)
        found = simulate_pairs(prompts, lengths, 32, steps=20000, seed=seed + 1000)
        parts = c.slot_context(prompts, lengths)
        assert inside(found, parts.total)
        without_covariance += inside(found, parts.prompt_mean + parts.response)
    assert without_covariance < len(SEEDS) / 2  # the covariance term of A10 is no decoration


def test_pairs_of_one_prompt_length_are_plain_refill():
    lengths = LAWS["bimodal"].sample(500, np.random.default_rng(3))
    found = simulate_pairs(np.full(500, 20), lengths, 32, steps=20000, seed=7)
    assert inside(found, c.refill_context(LengthDistribution.empirical(lengths), 20))


def test_the_band_is_narrow_enough_to_catch_the_unbiased_mean():
    # The naive answer, half of E[L], must fall outside: the inspection paradox is visible at this size.
    law = LAWS["lognormal"]
    refill = simulate_refill(law, 32, 0, steps=20000, seed=0)
    assert not inside(refill.context, (law.mean - 1) / 2)
    assert not inside(refill.length_seen, law.mean)


@pytest.mark.parametrize("slots", [0, -3, 1.5])
def test_slots_below_one_are_named(slots):
    with pytest.raises(ValueError, match=f"slots={slots}: expected an integer >= 1"):
        c.kv_concentration(LAWS["bimodal"], slots)


def test_an_infinite_second_moment_is_named():
    with pytest.raises(ValueError, match=r"Prop\. 4\.1 needs a finite second moment"):
        c.refill_context_from_moments(3.0, float("inf"))


@pytest.mark.parametrize(
    ("prompts", "lengths", "probabilities", "message"),
    [
        ([], [], None, "non-empty"),
        ([1], [1, 2], None, "one prompt length per length"),
        ([1], [0], None, "lengths >= 1"),
        ([-1], [1], None, "prompts="),
        ([1, 2], [1, 2], [0.9, 0.2], "a sum of 1"),
        ([1, 2], [1, 2], [1.2, -0.2], "numbers >= 0"),
    ],
)
def test_bad_pairs_are_named(prompts, lengths, probabilities, message):
    with pytest.raises(ValueError, match=message):
        c.slot_context(prompts, lengths, probabilities)
