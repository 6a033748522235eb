"""Positions, divergence and the cluster bootstrap, against values worked out by hand and a plain loop (§B.5)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.fidelity.bootstrap import bootstrap_means, cluster_draws, mean_interval
from kv4rl.fidelity.corpus import History, state_positions
from kv4rl.fidelity.divergence import sampler_kl
from kv4rl.fidelity.measure import geometric_ratio, make_arm, mean_kl, reduction


def test_eight_positions_span_the_response():
    assert state_positions(8) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert state_positions(101) == (0, 14, 29, 43, 57, 71, 86, 100)


@given(st.integers(8, 20_000))
def test_positions_are_distinct_and_reach_both_ends(length):
    positions = state_positions(length)
    assert positions[0] == 0 and positions[-1] == length - 1
    assert sorted(set(positions)) == list(positions) and len(positions) == 8


@pytest.mark.parametrize("length", [0, 1, 7])
def test_responses_below_eight_tokens_are_refused(length):
    with pytest.raises(ValueError, match=f"response tokens={length}"):
        state_positions(length)
    with pytest.raises(ValueError, match="response tokens of short"):
        History("short", [1], [2] * length)


def test_kl_of_two_coins():
    reference = torch.tensor([0.5, 0.5]).log()
    sampler = torch.tensor([0.25, 0.75]).log()
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert sampler_kl(reference, sampler).item() == pytest.approx(expected, rel=1e-6)  # the logs are float32
    backwards = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert sampler_kl(sampler, reference).item() == pytest.approx(backwards, rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.floats(0.01, 30))
def test_kl_is_positive_zero_on_itself_and_blind_to_shifts(seed, scale):
    logits = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(seed)) * scale
    assert torch.equal(sampler_kl(logits[0], logits[0]), torch.zeros(4, dtype=torch.float64))
    kl = sampler_kl(logits[0], logits[1])
    assert (kl > 0).all()
    assert torch.allclose(sampler_kl(logits[0].double(), logits[1].double() + 3), kl)


def test_kl_refuses_other_shapes_and_non_finite_logits():
    with pytest.raises(ValueError, match=r"logits\.shape"):
        sampler_kl(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="NaN"):
        sampler_kl(torch.zeros(2), torch.tensor([0.0, float("nan")]))


@given(st.integers(1, 40), st.integers(0, 100))
def test_every_draw_takes_as_many_responses_as_there_are(clusters, seed):
    draws = cluster_draws(clusters, seed=seed, draws=20)
    assert draws.shape == (20, clusters) and (draws.sum(axis=1) == clusters).all() and (draws >= 0).all()


def test_the_vectorised_bootstrap_equals_a_loop():
    values = np.array([1.0, 4.0, 2.0, 8.0])
    chosen = np.random.default_rng(5).integers(4, size=(100, 4))
    loop = [values[list(draw)].mean() for draw in chosen]
    assert np.allclose(bootstrap_means(values, seed=5, draws=100), loop)


def test_equal_responses_have_no_spread_and_seeds_repeat():
    assert mean_interval([0.25] * 6, seed=0) == (0.25, 0.25)
    assert mean_interval([1.0, 2.0, 4.0], seed=1) == mean_interval([1.0, 2.0, 4.0], seed=1)


def test_whole_responses_are_resampled_not_states():
    """States of a response that agree with each other carry no more information than one of them."""
    kl = np.repeat(np.array([[1.0], [2.0], [3.0]]), 8, axis=1)
    estimate = mean_kl(kl)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 1.0, 3.0)


def test_reduction_is_the_ratio_of_means_and_geometric_ratio_the_mean_of_log_ratios():
    small = np.repeat(np.array([[1.0], [2.0]]), 8, axis=1)
    large = np.repeat(np.array([[4.0], [32.0]]), 8, axis=1)
    assert reduction(small, large).value == 36 / 3
    ratio = geometric_ratio(small, large)
    assert ratio.value == pytest.approx(math.sqrt(1 / 4 * 1 / 16))
    assert (ratio.low, ratio.high) == pytest.approx((1 / 16, 1 / 4))


def test_paired_draws_make_a_constant_factor_exact():
    kl = np.random.default_rng(0).gamma(1.0, size=(32, 8))
    estimate = reduction(kl, 7 * kl)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((7, 7, 7))


def test_ratios_refuse_what_they_cannot_compare():
    kl = np.ones((3, 8))
    with pytest.raises(ValueError, match="responses=3"):
        reduction(kl, np.ones((4, 8)))
    with pytest.raises(ValueError, match="smallest KL"):
        geometric_ratio(np.zeros((3, 8)), kl)
    with pytest.raises(ValueError, match=r"kl\.shape"):
        mean_kl(np.ones((3, 7)))


def test_arms_are_named_after_what_differs():
    assert make_arm("kv4rl").name == "kv4rl"
    assert make_arm("kv4rl", sink_tokens=0, recent_tokens=64).name == "kv4rl-s0-w64"
    assert make_arm("kv4", recent_tokens=64).name == "kv4"
    with pytest.raises(ValueError, match="precision='int3'"):
        make_arm("int3")
