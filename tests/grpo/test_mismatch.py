import math

import pytest
import torch

from kv4rl.grpo.mismatch import sampler_mismatch


def measure(old, q, lengths, clip=5.0):
    return sampler_mismatch(torch.tensor(old), torch.tensor(q), torch.tensor(lengths), clip)


def test_by_hand():
    # weights pi/q = 1/2 and 2
    metrics = measure([math.log(0.2), math.log(0.4)], [math.log(0.4), math.log(0.2)], [2])
    expected = {
        "rollout_corr/kl": 0.0,
        "rollout_corr/k3_kl": (0.5 + math.log(2) - 1 + 2 - math.log(2) - 1) / 2,
        "rollout_corr/chi2_token": (0.25 + 4) / 2 - 1,
        "rollout_corr/rollout_is_mean": 1.25,
        "rollout_corr/rollout_is_max": 2.0,
        "rollout_corr/rollout_is_min": 0.5,
        "rollout_corr/rollout_is_std": 0.75,
        "rollout_corr/rollout_is_eff_sample_size": 2.5**2 / (2 * 4.25),
        "rollout_corr/rollout_is_ratio_fraction_high": 0.0,
        "rollout_corr/training_ppl": 0.08**-0.5,
        "rollout_corr/rollout_ppl": 0.08**-0.5,
        "rollout_corr/ppl_ratio": 1.0,
        "training/rollout_probs_diff_mean": 0.2,
        "training/rollout_probs_diff_max": 0.2,
        "training/rollout_probs_diff_std": 0.0,
        "training/rollout_actor_probs_pearson_corr": -1.0,
    }
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_the_clip_does_not_hide_drift():
    """NeMo-RL #2269: clamped weights say nothing of how far they were clamped."""
    metrics = measure([-1.0, -1.0, -1.0, -1.0], [-1.0, -4.0, -5.0, -1.0], [4], clip=5.0)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(math.exp(4))
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5


def test_equal_policies_show_no_mismatch():
    logp = [-1.0, -0.5, -3.0]
    metrics = measure(logp, logp, [1, 0, 2])
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert metrics["rollout_corr/k3_kl"] == 0.0
    assert metrics["training/rollout_probs_diff_max"] == 0.0


def test_perplexities_average_over_responses_not_tokens():
    metrics = measure([-1.0, -2.0, -2.0, -2.0], [-1.0, -2.0, -2.0, -2.0], [1, 3])
    assert metrics["rollout_corr/training_ppl"] == pytest.approx((math.e + math.exp(2)) / 2)


def test_a_single_token_has_no_correlation_to_report():
    assert "training/rollout_actor_probs_pearson_corr" not in measure([-1.0], [-1.0], [1])
