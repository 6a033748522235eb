"""The exact merge of attention over disjoint sets of positions (Eq. A1)."""

import torch

from kv4rl.config import require


def merge_state(
    o_a: torch.Tensor, z_a: torch.Tensor, o_b: torch.Tensor, z_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two regional outputs: z = log(e^z_a + e^z_b), o = e^(z_a - z) o_a + e^(z_b - z) o_b (Eq. A1).

    o_a, o_b: [..., d], each normalised within its own region. z_a, z_b: [...], natural logarithms of the regions'
    softmax denominators. An empty region has z = -inf and weighs zero whatever its output holds; two empty regions
    give (0, -inf). Raises `ValueError` on mismatched shapes.
    """
    require(o_a.shape == o_b.shape, "o_b.shape", tuple(o_b.shape), f"o_a's, {tuple(o_a.shape)}")
    require(z_a.shape == o_a.shape[:-1], "z_a.shape", tuple(z_a.shape), f"{tuple(o_a.shape[:-1])}")
    require(z_b.shape == o_b.shape[:-1], "z_b.shape", tuple(z_b.shape), f"{tuple(o_b.shape[:-1])}")
    z = torch.logaddexp(z_a, z_b)
    merged = torch.zeros_like(o_a)
    for o_r, z_r in ((o_a, z_a), (o_b, z_b)):
        empty = (z_r == -torch.inf).unsqueeze(-1)
        merged = merged + torch.where(empty, 0.0, torch.exp(z_r - z).unsqueeze(-1) * o_r)
    return merged, z
