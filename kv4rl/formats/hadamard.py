"""The normalised Hadamard rotation of keys and queries (Eq. 3.4, §5.1).

Rotating both sides leaves every score as it was, since (QH)(KH)^T = Q K^T, and spreads a key's outlier channels
over all channels, which is what makes one INT4 scale per key vector enough.
"""

import torch

from kv4rl.config import require


def _require_power_of_two(d: int) -> None:
    require(d >= 1 and d & (d - 1) == 0, "head_dim", d, "a power of two (Sylvester's Hadamard matrix)")


def hadamard_matrix(d: int, *, dtype: torch.dtype = torch.float32, device=None) -> torch.Tensor:
    """Sylvester's Hadamard matrix divided by sqrt(d): [d, d], symmetric and its own inverse (Eq. 3.4).

    Raises `ValueError` unless `d` is a power of two.

    >>> hadamard_matrix(2)
    tensor([[ 0.7071,  0.7071],
            [ 0.7071, -0.7071]])
    """
    _require_power_of_two(d)
    signs = torch.ones(1, 1, dtype=torch.float64, device=device)
    while signs.shape[0] < d:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)), 0)
    return (signs * d**-0.5).to(dtype)


@torch.no_grad()
def rotate(x: torch.Tensor) -> torch.Tensor:
    """x @ H over the last dimension (Eq. 3.4): [..., d] in any floating dtype -> [..., d] FP32, without gradients.

    Written as log2(d) butterflies, not as a matmul: it does less work, and nobody's choice of TF32 or BF16 for
    matmuls reaches it. Raises `ValueError` unless `d` is a power of two.
    """
    d = x.shape[-1]
    _require_power_of_two(d)
    y = x.float()
    half = d // 2
    while half:
        upper, lower = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.empty_like(y)
        total, difference = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        torch.add(upper, lower, out=total)
        torch.sub(upper, lower, out=difference)
        half //= 2
    return y * d**-0.5
