"""The formats of Fig. A4 and a few beyond it, each as one reversible storage step, and the error it leaves (§D.4)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from kv4rl.config import require
from kv4rl.formats.affine import dequantize_affine, quantize_affine, quantize_affine_mse
from kv4rl.formats.fp4 import dequantize_mxfp4, dequantize_nvfp4, quantize_mxfp4, quantize_nvfp4
from kv4rl.formats.hadamard import rotate
from kv4rl.formats.storage import bits_per_element
from kv4rl.formats.symmetric import dequantize_symmetric, quantize_symmetric


@dataclass(frozen=True)
class StorageFormat:
    """How vectors are stored and got back; `bits` of one code, without metadata."""

    bits: int
    quantize: Callable[[torch.Tensor], NamedTuple]
    dequantize: Callable[[NamedTuple], torch.Tensor]

    def reconstruct(self, x: torch.Tensor, *, rotated: bool = False) -> torch.Tensor:
        """`x` [..., d] after storage, float32; `rotated`: stored in the Hadamard basis and rotated back (Eq. 3.4)."""
        stored = self.dequantize(self.quantize(rotate(x) if rotated else x))
        return rotate(stored) if rotated else stored

    def bits_per_element(self, x: torch.Tensor) -> float:
        """Bits of codes and metadata per element of `x` [..., d], counted from the bytes."""
        return bits_per_element(self.quantize(x), self.bits)

    def error(self, x: torch.Tensor, *, rotated: bool = False) -> float:
        """RMS error of `reconstruct` relative to the RMS of `x`."""
        error = self.reconstruct(x, rotated=rotated).double() - x.double()
        return (error.square().mean() / x.double().square().mean()).sqrt().item()


def _affine(bits: int, group: int | None) -> StorageFormat:
    return StorageFormat(bits, partial(quantize_affine, bits=bits, group=group), dequantize_affine)


FORMATS = {
    "int4": _affine(4, None),  # one scale and offset per vector: the main cache's
    "int4_g64": _affine(4, 64),
    "int4_g32": _affine(4, 32),
    "int4_g16": _affine(4, 16),
    "nvfp4": StorageFormat(4, quantize_nvfp4, dequantize_nvfp4),
    "mxfp4": StorageFormat(4, quantize_mxfp4, dequantize_mxfp4),
    "int8": StorageFormat(8, quantize_symmetric, dequantize_symmetric),
}

# Beyond the paper: more bits for the same single group, and a range chosen by its error when a vector is written.
VARIANTS = {
    "int5": _affine(5, None),
    "int6": _affine(6, None),
    "int8_affine": _affine(8, None),
    "int4_mse": StorageFormat(4, quantize_affine_mse, dequantize_affine),
}


def storage_format(name: str) -> StorageFormat:
    """The format of that name, of `FORMATS` or `VARIANTS`. Raises ValueError for an unknown one."""
    known = FORMATS | VARIANTS
    require(name in known, "format", name, f"one of {', '.join(known)}")
    return known[name]
