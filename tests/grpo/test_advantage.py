import math

import pytest
import torch

from kv4rl.grpo.advantage import group_advantages


def test_one_of_four_correct_by_hand():
    # R = 1, 0, 0, 0: mean 1/4, squared deviations 9/16 + 3/16 = 3/4, s = sqrt(3/4 / 3) = 1/2 (ddof = 1)
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64))
    expected = torch.tensor([[0.75, -0.25, -0.25, -0.25]], dtype=torch.float64) / (0.5 + 1e-6)
    assert torch.equal(advantages, expected)


def test_the_population_deviation_would_give_other_advantages():
    """Notes §3: for G = 8, ddof = 0 makes every advantage 6.9 % larger."""
    rewards = torch.tensor([[1.0] * 3 + [0.0] * 5], dtype=torch.float64)
    ours = group_advantages(rewards)
    population = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    assert float(population[0, 0] / ours[0, 0]) == pytest.approx(math.sqrt(8 / 7), rel=1e-5)


def test_groups_are_normalised_by_themselves():
    rewards = torch.tensor([[0.0, 1.0, 1.0], [5.0, 3.0, 4.0]], dtype=torch.float64)
    together = group_advantages(rewards)
    assert torch.equal(together, torch.cat([group_advantages(rewards[:1]), group_advantages(rewards[1:])]))
    assert together[1].tolist() == pytest.approx([1 / (1 + 1e-6), -1 / (1 + 1e-6), 0.0])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.1, -3.7])
def test_equal_rewards_give_exactly_zero_whatever_rounding_does_to_their_deviation(reward):
    """NeMo-RL #4158: the float deviation of equal rewards need not be zero."""
    advantages = group_advantages(torch.full((2, 7), reward, dtype=torch.float32))
    assert torch.equal(advantages, torch.zeros(2, 7))


def test_a_group_of_one_is_refused():
    """verl gives A = R there."""
    with pytest.raises(ValueError, match=r"responses_per_group=1: expected at least 2"):
        group_advantages(torch.tensor([[1.0]]))


def test_wrong_shape_and_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match=r"rewards\.shape"):
        group_advantages(torch.zeros(4))
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([[1.0, float("nan")]]))
