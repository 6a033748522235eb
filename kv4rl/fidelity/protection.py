"""Which positions each forced row reads from the better copy: masks of the paper's regions and of our two controls."""

import torch
from torch import Tensor

from kv4rl.fidelity.representation import Protection


def visible_mask(contexts: Tensor, columns: int) -> Tensor:
    """contexts int64 [R] -> bool [R, columns]: row r sees its first contexts[r] positions."""
    return torch.arange(columns, device=contexts.device) < contexts[:, None]


def region_mask(protection: Protection, contexts: Tensor, columns: int) -> Tensor:
    """Sink and recent positions of every row, bool [R, columns] (`attention/regions.py` says which they are)."""
    positions = torch.arange(columns, device=contexts.device)
    recent = positions >= contexts[:, None] - protection.recent
    return (recent | (positions < protection.sink)) & visible_mask(contexts, columns)


def random_mask(protection: Protection, contexts: Tensor, columns: int, *, seed: int) -> Tensor:
    """`count` of each row's visible positions, by one random order of all positions a seed: bool [R, columns]."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(columns, generator=generator).to(contexts.device)
    return largest(order.expand(len(contexts), columns), contexts, protection.count)


def attention_mask(protection: Protection, probabilities: Tensor, earlier: Tensor, contexts: Tensor) -> Tensor:
    """The `count` visible positions of the largest accumulated attention, of each KV head and row.

    probabilities: [kv_heads, group, R, columns] of the forced rows; earlier: [kv_heads, prompt tokens], what the
    prompt's own queries gave each position. Returns bool [kv_heads, 1, R, columns].
    """
    mass = probabilities.sum(1).cumsum_(1)
    mass[..., : earlier.shape[-1]] += earlier.unsqueeze(1)
    return largest(mass, contexts, protection.count).unsqueeze(1)


def largest(score: Tensor, contexts: Tensor, count: int) -> Tensor:
    """bool [..., R, columns]: the `count` largest scores among each row's visible positions, or all of those."""
    visible = visible_mask(contexts, score.shape[-1])
    ranked = score.masked_fill(~visible, -torch.inf).topk(min(count, score.shape[-1]), -1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, ranked, True) & visible
