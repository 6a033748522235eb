"""Every formula by hand, on ratios chosen so that each clip binds and does not bind."""

import math

import pytest
import torch

from kv4rl.config import GRPOConfig
from kv4rl.grpo.loss import clipped_surrogate, grpo_loss, k3_penalty, tis_weights, unclipped_tis_weights

CONFIG = GRPOConfig(kl_coefficient=0.0)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(ratio, advantage, *, tis=1.0, reference_gap=0.0, config=CONFIG):
    """Loss, d loss / d logp and stats of one token with the given ratio, tis_weight and log pi_ref - log pi."""
    logp = double(-1.0).requires_grad_()
    old = logp.detach() - math.log(ratio)
    loss, stats = grpo_loss(
        logp, old, old - math.log(tis), logp.detach() + reference_gap, double(advantage), None,
        config=config, num_tokens=1,
    )  # fmt: skip
    loss.backward()
    return float(loss.detach()), float(logp.grad), stats


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: -A, and its gradient is -r A
        (1.1, 2.0, -2.2, -2.2),  # inside [0.8, 1.2]
        (1.5, 2.0, -2.4, 0.0),  # A > 0, r > 1.2: clipped at 1.2
        (0.5, 2.0, -1.0, -1.0),  # A > 0, r < 0.8: the unclipped is the larger loss
        (1.0, -2.0, 2.0, 2.0),
        (0.5, -2.0, 1.6, 0.0),  # A < 0, r < 0.8: clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),  # A < 0, r > 1.2: unclipped
        (2.9, -2.0, 5.8, 5.8),  # just below the dual clip
        (3.5, -2.0, 6.0, 0.0),  # dual clip: 3 |A|, no gradient
        (3.5, 2.0, -2.4, 0.0),  # no dual clip for A > 0
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_surrogate_and_gradient_by_hand(ratio, advantage, loss, gradient):
    value, slope, _ = one_token(ratio, advantage)
    assert value == pytest.approx(loss)
    assert slope == pytest.approx(gradient)


def test_the_clips_that_bind_are_the_ones_reported():
    ratios = double(1.0, 1.5, 0.5, 1.5, 0.5, 3.5, 3.5)
    advantages = double(2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 2.0)
    _, clip, dual = clipped_surrogate(ratios, advantages, CONFIG)
    assert clip.tolist() == [False, True, False, False, True, False, True]
    assert dual.tolist() == [False, False, False, False, False, True, False]


def test_asymmetric_clip_bounds():
    config = GRPOConfig(clip_low=0.1, clip_high=0.3, kl_coefficient=0.0)
    loss, _, _ = clipped_surrogate(double(2.0, 0.5), double(1.0, -1.0), config)
    assert loss.tolist() == pytest.approx([-1.3, 0.9])


def test_tis_weight_is_the_policy_over_the_sampler_truncated_at_c():
    old, q = double(-1.0, -1.0, -1.0, -1.0), double(-1.0, -1.0 - math.log(2), -1.0 + math.log(2), -4.0)
    assert tis_weights(old, q, clip=5.0).tolist() == pytest.approx([1.0, 2.0, 0.5, 5.0])
    assert unclipped_tis_weights(old, q).tolist() == pytest.approx([1.0, 2.0, 0.5, math.exp(3)])


def test_an_impossible_token_does_not_overflow():
    """The log-ratio is clamped to ±20 before exp."""
    assert unclipped_tis_weights(double(0.0, -200.0), double(-200.0, 0.0)).tolist() == pytest.approx(
        [math.exp(20), math.exp(-20)]
    )
    value, slope, _ = one_token(math.exp(100), -1.0)
    assert (value, slope) == (3.0, 0.0)


def test_tis_multiplies_after_the_clips_and_not_the_penalty():
    # clipped surrogate at r = 1.5, A = 2 is -2.4; d = ln 2: k3 = 2 - ln 2 - 1, weighted by the coefficient alone
    config = GRPOConfig(kl_coefficient=0.1)
    value, _, _ = one_token(1.5, 2.0, tis=3.0, reference_gap=math.log(2), config=config)
    assert value == pytest.approx(3.0 * -2.4 + 0.1 * (1 - math.log(2)))
    dual, _, _ = one_token(3.5, -2.0, tis=7.0, config=CONFIG)
    assert dual == pytest.approx(5.0 * 6.0)  # C = 5 bounds the weight, 3 |A| the surrogate


def test_no_gradient_flows_through_the_tis_weight():
    """verl #4105. Here old_logp is the training forward's own tensor, as the "detach" switch has it."""
    logp = double(-1.0).requires_grad_()
    loss, _ = grpo_loss(logp, logp, double(-1.5), None, double(1.0), None, config=CONFIG, num_tokens=1)
    loss.backward()
    assert float(logp.grad) == pytest.approx(-math.exp(0.5))  # -c r A; a gradient through c would double it


def test_the_tis_weight_comes_from_the_old_policy_not_the_current_one():
    """slime #179."""
    value, _, _ = one_token(1.1, 1.0, tis=2.0)
    assert value == pytest.approx(-1.1 * 2.0)  # from the current policy the weight would be 2.2


@pytest.mark.parametrize("gap", [0.0, 0.5, -0.5, 2.0])
def test_k3_by_hand(gap):
    assert float(k3_penalty(double(-1.0), double(-1.0 + gap))) == pytest.approx(math.exp(gap) - gap - 1)


def test_k3_is_clamped():
    assert k3_penalty(double(-30.0, 0.0), double(0.0, -30.0)).tolist() == pytest.approx([10.0, 10.0])


def test_k3_enters_the_loss_with_its_coefficient_and_gradient():
    # d/dlogp (exp(d) - d - 1) = 1 - exp(d)
    config = GRPOConfig(kl_coefficient=0.001)
    value, slope, stats = one_token(1.0, 0.0, reference_gap=0.7, config=config)
    assert value == pytest.approx(0.001 * (math.exp(0.7) - 0.7 - 1))
    assert slope == pytest.approx(0.001 * (1 - math.exp(0.7)))
    assert stats.means()["kl_loss"] == pytest.approx(math.exp(0.7) - 0.7 - 1)  # logged without the coefficient


def test_masked_tokens_are_never_read():
    """slime #657: nor do they stay in the denominator. NaN there must reach neither loss nor gradient."""
    logp = double(-1.0, float("nan"), -2.0).requires_grad_()
    nan = double(-1.0, float("nan"), -2.0)
    mask = torch.tensor([True, False, True])
    loss, stats = grpo_loss(
        logp, nan, nan, nan, double(1.0, float("nan"), 3.0), mask, config=GRPOConfig(), num_tokens=2
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-2.0)
    assert logp.grad.tolist() == pytest.approx([-0.5, 0.0, -1.5])
    assert float(stats.count) == 2


def test_tokens_of_a_degenerate_group_stay_in_the_mean():
    """A = 0 adds nothing to the sum, but its tokens count in N_tok (§3, DAPO-style token mean)."""
    advantages = double(2.0, 0.0, 0.0, 0.0)
    zeros = torch.zeros(4, dtype=torch.float64)
    loss, _ = grpo_loss(
        zeros.clone().requires_grad_(), zeros, zeros, zeros, advantages, None, config=CONFIG, num_tokens=4
    )
    assert float(loss.detach()) == pytest.approx(-0.5)


def random_columns(n: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda scale: torch.randn(n, generator=generator, dtype=torch.float64) * scale
    logp = -draw(1.0).abs() - 1
    return logp, logp + draw(0.8), logp + draw(1.0), logp + draw(0.3), draw(1.0)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_gradient_and_statistics_do_not_depend_on_the_number_of_microbatches(parts):
    """prime-rl #583, TRL #3021, verl #4711: per-microbatch means weigh tokens of small microbatches more."""
    n, config = 101, GRPOConfig()
    columns = random_columns(n, seed=3)
    whole = columns[0].clone().requires_grad_()
    loss, expected = grpo_loss(whole, *columns[1:], None, config=config, num_tokens=n)
    loss.backward()
    bounds = sorted(torch.randperm(n - 1, generator=torch.Generator().manual_seed(parts))[: parts - 1].add(1).tolist())
    split = columns[0].clone().requires_grad_()
    total = None
    for start, stop in zip([0, *bounds], [*bounds, n], strict=True):
        part = [column[start:stop] for column in (split, *columns[1:])]
        loss, stats = grpo_loss(*part, None, config=config, num_tokens=n)
        loss.backward()
        total = stats if total is None else total + stats
    assert torch.equal(split.grad, whole.grad)
    assert total.means() == pytest.approx(expected.means())
    assert 0 < expected.means()["pg_clipfrac"] < 1 and 0 < expected.means()["pg_clipfrac_lower"] < 1


def test_statistics_are_token_means_of_what_binds():
    ratios, advantages = double(1.0, 1.5, 0.5, 3.5, 1.0), double(1.0, 1.0, -1.0, -1.0, 1.0)
    old = -ratios.log()
    zeros = torch.zeros(5, dtype=torch.float64)
    _, stats = grpo_loss(zeros, old, old - math.log(2), zeros, advantages, None, config=CONFIG, num_tokens=5)
    means = stats.means()
    assert means["pg_clipfrac"] == pytest.approx(2 / 5)
    assert means["pg_clipfrac_lower"] == pytest.approx(1 / 5)
    assert means["ppo_kl"] == pytest.approx(-float(ratios.log().mean()))
    assert means["tis_weight"] == pytest.approx(2.0)
    assert means["pg_loss"] == pytest.approx(2 * (-1 - 1.2 + 0.8 + 3 - 1) / 5)


def test_what_the_loss_cannot_do_without_is_named():
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="num_tokens=0"):
        grpo_loss(zeros, zeros, zeros, zeros, zeros, None, config=CONFIG, num_tokens=0)
    with pytest.raises(ValueError, match="reference_logp=None"):
        grpo_loss(zeros, zeros, zeros, None, zeros, None, config=GRPOConfig(), num_tokens=1)
