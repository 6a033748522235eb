"""Inverse-CDF sampling of long rows in two steps: which block of tokens holds the target, then which token of it.

Only the masses of blocks are kept, so that a vocabulary of 152k tokens is read twice and never written: on CUDA the
masses are one compiled reduction.
"""

import math
from functools import cache

import torch


@cache
def block_size(tokens: int) -> int:
    """Tokens of a block: the smallest divisor of `tokens` that is at least its square root."""
    return next(size for size in range(math.isqrt(tokens - 1) + 1, tokens + 1) if tokens % size == 0)


def block_masses(logits: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Sums of exp(logit - top) over blocks: logits FP32 [B, V], top FP32 [B] -> float64 [B, V / block_size(V)]."""
    blocks = logits.unflatten(1, (-1, block_size(logits.shape[1])))
    return (blocks - top[:, None, None]).exp().sum(-1, dtype=torch.float64)


@cache
def _compiled():
    return torch.compile(block_masses, dynamic=True)


def masses_of(logits: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """`block_masses`, compiled on CUDA."""
    return (_compiled() if logits.is_cuda else block_masses)(logits, top)


def locate(logits: torch.Tensor, top: torch.Tensor, masses: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The token int64 [B] at which the cumulative mass of a row exceeds `target` float64 [B], in [0, the row's mass).

    Never a token of no mass; some token of the vocabulary for a row of NaN.
    """
    size = block_size(logits.shape[1])
    ends = masses.cumsum(-1)
    block = (ends <= target[:, None]).sum(-1, keepdim=True).clamp(max=masses.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = logits.unflatten(1, (-1, size)).gather(1, block[:, :, None].expand(-1, -1, size))[:, 0]
    cdf = (chosen - top[:, None]).exp().cumsum(-1, dtype=torch.float64)
    # Rounding must not push the target past the last token of the block that has mass.
    within = torch.minimum(target[:, None] - before, torch.nextafter(cdf[:, -1:], torch.zeros_like(before)))
    return (block * size + torch.searchsorted(cdf, within, right=True).clamp(max=size - 1))[:, 0]
