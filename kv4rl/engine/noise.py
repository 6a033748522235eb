"""Sampling noise as a function, not a generator: one uniform per (run seed, prompt id, sibling, position).

A response then depends neither on its batch, nor on its replica, nor on the order of scheduling (design decision 6);
where a quantised cache preempts it, its prefix is computed again, unquantised, and later tokens may differ by that.
"""

from hashlib import blake2b

import torch

_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def noise_key(seed: int, prompt_id: str, sibling: int) -> int:
    """A signed 64-bit key of one response, from a cryptographic hash: the same in every process and version."""
    text = f"{seed}\0{sibling}\0{prompt_id}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def splitmix64(value: int) -> int:
    """SplitMix64's output for state `value`, unsigned (Steele, Lea and Flood 2014)."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """SplitMix64 at `positions` of the streams `keys` (int64 [B] both), as float64 [B] in [0, 1).

    Integer arithmetic that wraps, so CPU and CUDA agree to the bit. 52 bits are used: then u * total < total for every
    positive float64 total, and an inverse-CDF search never runs past the last token.
    """
    z = keys + positions * _signed(_GOLDEN) + _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    z = z ^ _shift(z, 31)
    return _shift(z, 12).to(torch.float64) * 2.0**-52


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
