"""Group-normalised advantages of GRPO (Eq. 3.1)."""

import torch

from kv4rl.config import require


def group_advantages(rewards: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """A = (R - mean R) / (s_R + epsilon) within each group, s_R with ddof = 1 (Eq. 3.1).

    rewards: [n_groups, G] floating; returns the same shape and dtype. Every token of a response carries its advantage.
    A group whose rewards are all equal gets exactly 0: rewards are compared, not their rounded standard deviation.

    Raises ValueError for G = 1 (no spread to normalise by) and for rewards that are not finite.
    """
    require(rewards.dim() == 2, "rewards.shape", tuple(rewards.shape), "[n_groups, G]")
    require(rewards.shape[1] >= 2, "responses_per_group", rewards.shape[1], "at least 2 responses to normalise over")
    require(bool(torch.isfinite(rewards).all()), "rewards", rewards.tolist(), "finite numbers")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = centred / (rewards.std(dim=1, correction=1, keepdim=True) + epsilon)
    constant = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return advantages.masked_fill(constant, 0.0)
