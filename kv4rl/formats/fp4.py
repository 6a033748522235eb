"""FP4 with block scales: NVFP4 and MXFP4, the storage formats that Fig. A4c sets beside affine INT4 (§D.4).

Both hold E2M1 elements (sign, two exponent bits, one mantissa bit) and differ in the scale of a block. These are
numerical probes of storage: nothing here has an attention kernel, and codes are one per byte until
`formats/storage.py` packs them.
"""

from typing import NamedTuple

import torch

from kv4rl.config import require
from kv4rl.formats.division import divided

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 … 7; codes 8 … 15 are their negatives (OCP MX)
E2M1_MAX = 6.0
E2M1_MAX_EXPONENT = 2  # of 6 = 1.5 x 2^2
E4M3_MAX = 448.0
E8M0_BIAS = 127
NVFP4_BLOCK = 16
MXFP4_BLOCK = 32

# Bound on magnitudes that leaves FP32 room for scales rounded up.
_EXTREME = 3e38


class NVFP4Codes(NamedTuple):
    """x_hat = global_scale * scale * E2M1(code)."""

    codes: torch.Tensor  # uint8 [..., d], values 0 … 15
    scale: torch.Tensor  # float8_e4m3fn [..., d / 16]
    global_scale: torch.Tensor  # float32 [...], one per vector


class MXFP4Codes(NamedTuple):
    """x_hat = scale * E2M1(code), the scale a power of two."""

    codes: torch.Tensor  # uint8 [..., d], values 0 … 15
    scale: torch.Tensor  # float8_e8m0fnu [..., d / 32]


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code of FP32 `x` [...], ties to the even code, saturating at ±6 -> uint8 [...].

    E2M1 has no NaN: a NaN becomes code 0, and the caller's scale has to carry it.
    """
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=x.device)
    upper = (magnitudes[:-1] + magnitudes[1:]) / 2
    # A tie belongs to the even code: below an odd code's upper midpoint the boundary is open, so step just under it.
    upper[1::2] = torch.nextafter(upper[1::2], torch.zeros_like(upper[1::2]))
    codes = torch.bucketize(x.abs().nan_to_num(nan=0.0).contiguous(), upper)
    return (codes + 8 * (torch.signbit(x) & ~x.isnan())).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0 … 15 -> float32. Code 8 is negative zero."""
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=codes.device)
    return torch.cat((magnitudes, -magnitudes))[codes.long()]


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """`x` [..., d] in FP32 as [..., d / block, block], with infinities made finite."""
    require(x.is_floating_point(), "x.dtype", x.dtype, "a floating dtype")
    d = x.shape[-1]
    require(d % block == 0 and d > 0, "x.shape[-1]", d, f"a multiple of the block of {block} elements")
    return x.float().clamp(-_EXTREME, _EXTREME).unflatten(-1, (d // block, block))


def _encode_scaled(blocks: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of blocks / step [..., blocks, block], flattened to [..., d]; a step of 0 gives zeros."""
    step = step.unsqueeze(-1)
    return encode_e2m1(blocks / torch.where(step == 0, torch.inf, step)).flatten(-2)


def quantize_nvfp4(x: torch.Tensor) -> NVFP4Codes:
    """Quantise the last dimension of `x` [..., d] to NVFP4 with one FP32 scale per vector (§D.4).

    The global scale maps the vector's largest magnitude to 6 x 448, the largest value that an E4M3 scale and an E2M1
    element can form; each block of 16 then gets the E4M3 scale nearest to its own largest magnitude / 6, and its
    codes are rounded against the scales as stored. Infinities saturate; a zero vector has scales 0; a vector with a
    NaN in it gets a NaN global scale and decodes to NaN. Raises `ValueError` for an integer `x` or a d that is not a
    multiple of 16.
    """
    blocks = _blocks(x, NVFP4_BLOCK)
    largest = blocks.abs().amax(-1)
    global_scale = divided(largest.amax(-1), E2M1_MAX * E4M3_MAX)
    per_vector = global_scale.unsqueeze(-1)
    wanted = divided(largest, E2M1_MAX) / torch.where(per_vector == 0, torch.inf, per_vector)
    # torch's cast rounds to nearest even but turns overflow into NaN, so saturate first.
    scale = wanted.nan_to_num(nan=0.0).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    return NVFP4Codes(_encode_scaled(blocks, scale.float() * per_vector), scale, global_scale)


def dequantize_nvfp4(q: NVFP4Codes) -> torch.Tensor:
    """global_scale * scale * E2M1(code) -> float32 [..., d]."""
    step = q.scale.float() * q.global_scale.unsqueeze(-1)
    return (decode_e2m1(q.codes).unflatten(-1, (-1, NVFP4_BLOCK)) * step.unsqueeze(-1)).flatten(-2)


def quantize_mxfp4(x: torch.Tensor) -> MXFP4Codes:
    """Quantise the last dimension of `x` [..., d] to MXFP4 as OCP MX 1.0, 6.3 does (§D.4).

    A block's scale is 2^(e - 2) with e the exponent of its largest magnitude (clamped to E8M0's 2^-127 … 2^127), so
    magnitudes above 6 x scale saturate: a constant 7 decodes to 6. A zero block has the smallest scale and zero
    codes; a block with a NaN in it gets E8M0's NaN and decodes to NaN. Raises `ValueError` for an integer `x` or a d
    that is not a multiple of 32.
    """
    blocks = _blocks(x, MXFP4_BLOCK)
    largest = blocks.abs().amax(-1)
    # frexp's mantissa lies in [0.5, 1): its exponent is one more than floor(log2).
    exponent = torch.frexp(largest).exponent - 1 - E2M1_MAX_EXPONENT
    stored = torch.where(largest == 0, 0, exponent + E8M0_BIAS).clamp(0, 2 * E8M0_BIAS)
    stored = torch.where(largest.isnan(), 2 * E8M0_BIAS + 1, stored).to(torch.uint8)
    scale = stored.view(torch.float8_e8m0fnu)
    return MXFP4Codes(_encode_scaled(blocks, scale.float()), scale)


def dequantize_mxfp4(q: MXFP4Codes) -> torch.Tensor:
    """scale * E2M1(code) -> float32 [..., d]."""
    return (decode_e2m1(q.codes).unflatten(-1, (-1, MXFP4_BLOCK)) * q.scale.float().unsqueeze(-1)).flatten(-2)
