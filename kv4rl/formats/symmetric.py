"""Symmetric INT8 codes with an FP16 scale per vector (§5.2, §A.3): the side buffer's format, and all of `kv8`."""

from typing import NamedTuple

import torch

from kv4rl.config import require
from kv4rl.formats.affine import to_fp16_saturating
from kv4rl.formats.division import divided

LEVELS = 127  # codes are -127 … 127: symmetric, -128 unused


class SymmetricCodes(NamedTuple):
    """x_hat = scale * code, one scale per vector (per token and head)."""

    codes: torch.Tensor  # int8 [..., d], values -127 … 127
    scale: torch.Tensor  # float16 [...]


def symmetric_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Integers nearest to x / scale within ±127, as FP32 [..., d]; 0 where scale is 0 or anything is NaN."""
    step = torch.where(scale > 0, scale, torch.inf).unsqueeze(-1)
    return (x / step).round_().clamp_(-LEVELS, LEVELS).nan_to_num_(0.0)


def quantize_symmetric(x: torch.Tensor) -> SymmetricCodes:
    """Quantise each vector along the last dimension of `x` [..., d] to INT8 with scale amax / 127 (§A.3).

    Computed in FP32; the scale saturates to FP16's range and the codes are rounded (half to even) against the FP16
    value. A zero vector gets scale 0; a vector with a NaN in it gets a NaN scale and decodes to NaN. Raises
    `ValueError` for an integer `x`.
    """
    require(x.is_floating_point(), "x.dtype", x.dtype, "a floating dtype")
    values = x.float()
    scale = to_fp16_saturating(divided(values.abs().amax(-1), LEVELS))
    return SymmetricCodes(symmetric_codes(values, scale.float()).to(torch.int8), scale)


def dequantize_symmetric(q: SymmetricCodes) -> torch.Tensor:
    """scale * code -> float32 [..., d]."""
    return q.codes.float() * q.scale.float().unsqueeze(-1)
