"""Affine integer codes with an FP16 scale and offset (Eq. 3.3, §5.1, §A.3): the INT4 format of the main cache."""

from typing import NamedTuple

import torch

from kv4rl.config import require
from kv4rl.formats.division import divided

FP16_MAX = 65504.0
# Bounds on a vector's extremes that keep their difference finite in FP32; far above what FP16 metadata can express.
_EXTREME = 1e38


class AffineCodes(NamedTuple):
    """x_hat = scale * code + offset (Eq. 3.3), one (scale, offset) per group of channels."""

    codes: torch.Tensor  # uint8 [..., d], values 0 … 2^bits - 1
    scale: torch.Tensor  # float16 [..., d / group], Delta
    offset: torch.Tensor  # float16 [..., d / group], m


def to_fp16_saturating(x: torch.Tensor) -> torch.Tensor:
    """FP32 -> FP16 where overflow becomes the largest finite value and NaN stays NaN."""
    return x.clamp(-FP16_MAX, FP16_MAX).half()


def quantize_affine(x: torch.Tensor, bits: int = 4, group: int | None = None) -> AffineCodes:
    """Quantise the last dimension of `x` [..., d] in groups of `group` channels (None: all d, the paper's choice).

    Computed in FP32. The scale and offset saturate to FP16's range, and the codes are rounded (half to even) against
    the FP16 values that the reader will use. A constant group gets scale 0 and decodes to the FP16-rounded constant;
    a group with a NaN in it gets NaN metadata and decodes to NaN. Raises `ValueError` for `bits` outside 1 … 8, a
    `group` that does not divide d, or an integer `x`.
    """
    grouped = _grouped(x, bits, group)
    return _encode(grouped, *_extremes(grouped), bits)


SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares of the full range that `quantize_affine_mse` tries


def quantize_affine_mse(x: torch.Tensor, bits: int = 4, group: int | None = None) -> AffineCodes:
    """`quantize_affine` whose range is the share of [min, max], about its middle, with the least squared error.

    Each group chooses among `SHRINK` for itself when it is written; elements outside the range saturate. What is
    stored, and so what a reader does, is the same as before. Ties go to the wider range, so a constant group is
    exact, and a group with a NaN decodes to NaN. Raises `ValueError` as `quantize_affine` does.
    """
    grouped = _grouped(x, bits, group)
    low, high = _extremes(grouped)
    middle, half = (low + high) / 2, (high - low) / 2
    best = _encode(grouped, low, high, bits)
    least = _squared_error(best, grouped)
    for share in SHRINK[1:]:
        tried = _encode(grouped, middle - share * half, middle + share * half, bits)
        error = _squared_error(tried, grouped)
        better = error < least
        least = torch.where(better, error, least)
        wide = better.repeat_interleave(grouped.shape[-1], -1)
        best = AffineCodes(
            torch.where(wide, tried.codes, best.codes),
            torch.where(better, tried.scale, best.scale),
            torch.where(better, tried.offset, best.offset),
        )
    return best


def _grouped(x: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """`x` [..., d] in FP32 as [..., d / group, group], arguments checked."""
    require(x.is_floating_point(), "x.dtype", x.dtype, "a floating dtype")
    require(1 <= bits <= 8, "bits", bits, "1 … 8")
    d = x.shape[-1]
    group = d if group is None else group
    require(group >= 1 and d % group == 0, "group", group, f"a divisor of the last dimension, {d}")
    return x.float().unflatten(-1, (d // group, group))


def _extremes(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = (extreme.clamp(-_EXTREME, _EXTREME) for extreme in grouped.aminmax(dim=-1, keepdim=True))
    return low, high


def _encode(grouped: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int) -> AffineCodes:
    levels = 2**bits - 1
    scale = to_fp16_saturating(divided(high - low, levels))
    offset = to_fp16_saturating(low)

    step = scale.float()
    codes = ((grouped - offset.float()) / torch.where(step > 0, step, torch.inf)).round_().clamp_(0, levels)
    codes = codes.nan_to_num_(0.0).to(torch.uint8).flatten(-2)
    return AffineCodes(codes, scale.squeeze(-1), offset.squeeze(-1))


def _squared_error(q: AffineCodes, grouped: torch.Tensor) -> torch.Tensor:
    """Of each group, [..., d / group]; NaN where the group holds one."""
    return (dequantize_affine(q).view_as(grouped) - grouped).square().sum(-1)


def dequantize_affine(q: AffineCodes) -> torch.Tensor:
    """scale * code + offset (Eq. 3.3) -> float32 [..., d]."""
    groups = q.scale.shape[-1]
    codes = q.codes.unflatten(-1, (groups, -1)).float()
    return (q.scale.float().unsqueeze(-1) * codes + q.offset.float().unsqueeze(-1)).flatten(-2)
