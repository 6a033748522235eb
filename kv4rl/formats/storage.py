"""What a quantised tensor costs when it is stored: codes packed to whole bytes, plus every byte of metadata (§D.4).

The storage cost that the paper gives for a format (4.25, 4.75, 5.00, 6.00 bits per element) is counted here from the
bytes themselves, for any codes of this package. The paged cache has its own layout, `formats/packing.py`.
"""

from typing import NamedTuple

import torch

from kv4rl.config import require


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., d] below 2^bits, uint8 -> their low `bits` bits as one stream a vector, uint8 [..., d * bits / 8].

    Raises `ValueError` for `bits` outside 1 … 8, a code that does not fit, or a vector that does not fill its bytes.
    """
    require(1 <= bits <= 8, "bits", bits, "1 … 8")
    d = codes.shape[-1]
    require(d * bits % 8 == 0, "codes.shape[-1]", d, f"a number of {bits}-bit codes that fills whole bytes")
    if codes.numel():
        require(int(codes.max()) < 2**bits, "code", int(codes.max()), f"below {2**bits}")
    stream = (codes.unsqueeze(-1) >> _places(bits, codes)) & 1
    in_bytes = stream.flatten(-2).unflatten(-1, (-1, 8))
    return (in_bytes << _places(8, codes)).sum(-1, dtype=torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [..., d * bits / 8] -> codes uint8 [..., d]."""
    require(1 <= bits <= 8, "bits", bits, "1 … 8")
    stream = ((packed.unsqueeze(-1) >> _places(8, packed)) & 1).flatten(-2)
    return (stream.unflatten(-1, (-1, bits)) << _places(bits, packed)).sum(-1, dtype=torch.uint8)


def _places(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)


def stored_bytes(q: NamedTuple, bits: int) -> int:
    """Bytes of `q`, a quantised tensor of this package whose first field are its codes, at `bits` bits a code."""
    codes, *metadata = q
    return pack_codes(codes.view(torch.uint8), bits).nbytes + sum(field.nbytes for field in metadata)


def bits_per_element(q: NamedTuple, bits: int) -> float:
    """Stored bits per element, codes and metadata: 4.25 for affine INT4 with one group of 128 (§D.4, Fig. A4b).

    >>> from kv4rl.formats.affine import quantize_affine
    >>> bits_per_element(quantize_affine(torch.zeros(3, 128), group=32), bits=4)
    5.0
    """
    return 8 * stored_bytes(q, bits) / q[0].numel()
