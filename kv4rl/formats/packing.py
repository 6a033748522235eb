"""Byte layout of one (page, KV head) chunk of the main cache: the one definition that every backend follows (§A.3).

A chunk holds the keys and values of `PAGE_TOKENS` positions of one KV head, contiguous and 64-byte aligned:

    kv4, kv4rl   K codes  8*d | V codes  8*d | 16 x (k_scale, k_offset, v_scale, v_offset) FP16     (2,176 B at d = 128)
    kv8          K codes 16*d | V codes 16*d | 16 x (k_scale, v_scale) FP16                         (4,160 B at d = 128)
    bf16         16*d K elements | 16*d V elements, in the model's dtype, token-major

Codes lie in *fragment order*: lane `4g + t` of a warp finds its own tensor-core operands in consecutive 16-byte loads
(kernels/README.md draws it), with KV on the M side and query heads on the N side.

* K feeds `mma.m16n8k32` (8-bit): rows g and g + 8 are tokens, columns are channels. Lane column t holds channels
  64s + 16t .. + 15, so that a query row (or a token of the row-major side buffer) is read in the same order by one
  16-byte load. For INT4 the low nibbles of four words are the operand of one MMA, the high nibbles that of the next.
* V feeds `mma.m16n8k16` (FP16): rows are channels, columns tokens. A word holds one whole operand: 16-bit half q is
  token 2t + q, its nibbles are (row g, row g + 8) of tokens 0-7, then of tokens 8-15. `word & 0x000F000F` is thus a
  pair of FP16 subnormals worth code * 2^-24. Rows g, g + 8 of tile j are channels g*d/8 + 2j and g*d/8 + 2j + 1, so
  that a lane's channels are adjacent.

The same V words are operands of the 8-bit `mma.m16n8k32` with tokens in the order 2t, 2t+8, 2t+1, 2t+9.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kv4rl.config import HEAD_DIMS, PAGE_TOKENS, PRECISIONS, require

INT4_METADATA = 4  # FP16 numbers a token: k_scale, k_offset, v_scale, v_offset
INT8_METADATA = 2  # k_scale, v_scale


def chunk_bytes(precision: str, head_dim: int, dtype: torch.dtype | None = None) -> int:
    """Bytes of one (page, KV head) chunk; `dtype` is the model's and matters to `bf16` alone. ValueError if unknown."""
    require(precision in PRECISIONS, "precision", precision, f"one of {', '.join(PRECISIONS)}")
    require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"one of {HEAD_DIMS}")
    elements = 2 * PAGE_TOKENS * head_dim
    if precision == "bf16":
        require(dtype is not None and dtype.is_floating_point, "dtype", dtype, "the model's floating-point dtype")
        return elements * dtype.itemsize
    if precision == "kv8":
        return elements + PAGE_TOKENS * INT8_METADATA * 2
    return elements // 2 + PAGE_TOKENS * INT4_METADATA * 2


# --- orders: [token dims + channel dims] of a [16, d] tile, and the permutation that makes bytes of it ------------
# Names: lane = 4g + t; b byte of a word; h, e nibble; i0 token half (rows g, g + 8); i1 channel half; q token pair.


def _k4_order(d: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = (2, 8, d // 64, 4, 2, 2, 4)  # token (i0, g), channel (s, t, h, i1, b)
    return shape, (2, 1, 3, 5, 0, 6, 4)  # bytes (s, g, t, i1, i0, b), nibble h


def _v4_order(d: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = (2, 4, 2, 8, d // 64, 4, 2)  # token (hi, t, q), channel (g, s, j, e)
    return shape, (4, 3, 1, 5, 2, 0, 6)  # bytes (s, g, t, j, q, hi), nibble e


def _k8_order(d: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = (2, 8, d // 64, 4, 2, 2, 4)  # token (i0, g), channel (s, t, x, i1, b)
    return shape, (2, 4, 1, 3, 5, 0, 6)  # bytes (s, x, g, t, i1, i0, b)


def _v8_order(d: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = (2, 4, 2, 8, d // 32, 2, 2)  # token (hi, t, q), channel (g, s, j, e)
    return shape, (4, 3, 1, 5, 0, 6, 2)  # bytes (s, g, t, j, hi, e, q)


def _permute_axes(x: torch.Tensor, lead: int, sizes: list[int], now: list[int], then: list[int]) -> torch.Tensor:
    """Unflatten all but the `lead` first dimensions of `x` into axes `now`, put them in the order `then`; dense."""
    tile = x.reshape(*x.shape[:lead], *(sizes[axis] for axis in now))
    return tile.permute(*range(lead), *(lead + now.index(axis) for axis in then)).contiguous()


@lru_cache
def _axes(order, d: int, nibbles: bool) -> tuple[list[int], list[int], list[int], int | None]:
    """(size of each axis, axes that number 4-byte words, axes inside a word, the nibble's axis), in storage order."""
    sizes, permutation = order(d)
    stored = list(permutation)
    nibble = stored.pop() if nibbles else None
    inner: list[int] = []
    while math.prod(sizes[axis] for axis in inner) < 4:
        inner.insert(0, stored.pop())
    return list(sizes), stored, inner, nibble


def _permute(tile_bytes: torch.Tensor, lead: int, order, d: int, nibbles: bool) -> torch.Tensor:
    """Bytes `[..., 16 * d or 8 * d]` in the order of their axes -> storage order. Whole words move at once."""
    sizes, words, inner, _ = _axes(order, d, nibbles)
    by_word = _permute_axes(tile_bytes, lead, sizes, sorted(words + inner), sorted(words) + inner)
    words_now = by_word.flatten(lead).view(torch.int32)
    return _permute_axes(words_now, lead, sizes, sorted(words), words).flatten(lead).view(tile_bytes.dtype)


def _unpermute(packed: torch.Tensor, order, d: int, nibbles: bool) -> torch.Tensor:
    """The inverse of `_permute`: storage order -> `[..., *axes]` in the order of the axes, the nibble's left out."""
    sizes, words, inner, _ = _axes(order, d, nibbles)
    lead = packed.dim() - 1
    moved = _permute_axes(packed.contiguous().view(torch.int32), lead, sizes, words, sorted(words))
    return _permute_axes(
        moved.flatten(lead).view(packed.dtype), lead, sizes, sorted(words) + inner, sorted(words + inner)
    )


def _check_codes(name: str, codes: torch.Tensor, dtype: torch.dtype) -> None:
    right = (
        codes.dtype == dtype and codes.dim() >= 2 and codes.shape[-2] == PAGE_TOKENS and codes.shape[-1] in HEAD_DIMS
    )
    found = f"{codes.dtype} {tuple(codes.shape)}"
    require(right, name, found, f"{dtype} [..., {PAGE_TOKENS}, head_dim] with head_dim in {HEAD_DIMS}")


def _bytes_head_dim(name: str, packed: torch.Tensor, bytes_per_channel: int) -> int:
    head_dim = packed.shape[-1] // bytes_per_channel
    right = packed.dtype == torch.uint8 and head_dim in HEAD_DIMS and packed.shape[-1] == bytes_per_channel * head_dim
    found = f"{packed.dtype} {tuple(packed.shape)}"
    require(right, name, found, f"torch.uint8 [..., {bytes_per_channel} * head_dim] with head_dim in {HEAD_DIMS}")
    return head_dim


def _pack4(codes: torch.Tensor, order) -> torch.Tensor:
    lead, d = codes.dim() - 2, codes.shape[-1]
    sizes, _, _, nibble = _axes(order, d, True)
    low, high = codes.reshape(*codes.shape[:-2], *sizes).unbind(lead + nibble)
    return _permute(low | (high << 4), lead, order, d, True)


def _unpack4(packed: torch.Tensor, order, d: int) -> torch.Tensor:
    nibble = _axes(order, d, True)[3]
    tile = _unpermute(packed, order, d, True)
    codes = torch.stack((tile & 15, tile >> 4), packed.dim() - 1 + nibble)
    return codes.reshape(*packed.shape[:-1], PAGE_TOKENS, d)


def _pack8(codes: torch.Tensor, order) -> torch.Tensor:
    return _permute(codes.view(torch.uint8), codes.dim() - 2, order, codes.shape[-1], False)


def _unpack8(packed: torch.Tensor, order, d: int) -> torch.Tensor:
    return _unpermute(packed, order, d, False).reshape(*packed.shape[:-1], PAGE_TOKENS, d).view(torch.int8)


def pack_k4(codes: torch.Tensor) -> torch.Tensor:
    """K codes 0..15, uint8 `[..., 16, d]` -> bytes uint8 `[..., 8*d]`. ValueError on a wrong dtype or shape."""
    _check_codes("codes", codes, torch.uint8)
    return _pack4(codes, _k4_order)


def unpack_k4(packed: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 `[..., 8*d]` -> K codes 0..15, uint8 `[..., 16, d]`."""
    return _unpack4(packed, _k4_order, _bytes_head_dim("packed", packed, 8))


def pack_v4(codes: torch.Tensor) -> torch.Tensor:
    """V codes 0..15, uint8 `[..., 16, d]` -> bytes uint8 `[..., 8*d]`."""
    _check_codes("codes", codes, torch.uint8)
    return _pack4(codes, _v4_order)


def unpack_v4(packed: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 `[..., 8*d]` -> V codes 0..15, uint8 `[..., 16, d]`."""
    return _unpack4(packed, _v4_order, _bytes_head_dim("packed", packed, 8))


def pack_k8(codes: torch.Tensor) -> torch.Tensor:
    """K codes int8 `[..., 16, d]` -> bytes uint8 `[..., 16*d]`."""
    _check_codes("codes", codes, torch.int8)
    return _pack8(codes, _k8_order)


def unpack_k8(packed: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 `[..., 16*d]` -> K codes int8 `[..., 16, d]`."""
    return _unpack8(packed, _k8_order, _bytes_head_dim("packed", packed, 16))


def pack_v8(codes: torch.Tensor) -> torch.Tensor:
    """V codes int8 `[..., 16, d]` -> bytes uint8 `[..., 16*d]`."""
    _check_codes("codes", codes, torch.int8)
    return _pack8(codes, _v8_order)


def unpack_v8(packed: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 `[..., 16*d]` -> V codes int8 `[..., 16, d]`."""
    return _unpack8(packed, _v8_order, _bytes_head_dim("packed", packed, 16))


# --- where one code lives: for writes of single tokens ------------------------------------------------------------


def _storage_positions(order, head_dim: int) -> torch.Tensor:
    """int64 `[16, d]`: the place of each (token, channel) in storage order."""
    require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"one of {HEAD_DIMS}")
    shape, permutation = order(head_dim)
    place = torch.arange(PAGE_TOKENS * head_dim).reshape([shape[axis] for axis in permutation])
    return place.permute([permutation.index(axis) for axis in range(len(shape))]).reshape(PAGE_TOKENS, head_dim)


def _nibble_index(order, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    place = _storage_positions(order, head_dim)
    return place // 2, (place % 2 * 4).to(torch.uint8)


@lru_cache
def k4_index(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(byte_index int64 [16, d], shift uint8 [16, d])`: the code of (token, channel) is `bytes[index] >> shift & 15`.

    Indices count from the start of the K codes. CPU tensors, shared between callers: do not write to them.
    """
    return _nibble_index(_k4_order, head_dim)


@lru_cache
def v4_index(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `k4_index`, from the start of the V codes."""
    return _nibble_index(_v4_order, head_dim)


@lru_cache
def k8_index(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `k4_index` for INT8 K codes; every shift is 0."""
    place = _storage_positions(_k8_order, head_dim)
    return place, torch.zeros_like(place, dtype=torch.uint8)


@lru_cache
def v8_index(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `k4_index` for INT8 V codes; every shift is 0."""
    place = _storage_positions(_v8_order, head_dim)
    return place, torch.zeros_like(place, dtype=torch.uint8)


# --- the parts of a chunk -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkView:
    """Views of one or many chunks, all aliasing the storage; fields a precision does not have are None."""

    k_codes: torch.Tensor | None = None  # uint8 [..., 8*d] (INT4) or [..., 16*d] (INT8), in storage order
    v_codes: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None  # float16 [..., 16]
    k_offset: torch.Tensor | None = None  # float16 [..., 16]; INT4 only
    v_scale: torch.Tensor | None = None
    v_offset: torch.Tensor | None = None
    k: torch.Tensor | None = None  # bf16 alone: [..., 16, d] of the model's dtype
    v: torch.Tensor | None = None


def split_chunk(
    chunk: torch.Tensor, precision: str, head_dim: int, dtype: torch.dtype | None = None
) -> ChunkView:  # fmt: skip
    """Name the parts of `chunk`, uint8 `[..., chunk_bytes]` with a dense last dimension; writes go through.

    ValueError if the last dimension is not `chunk_bytes(precision, head_dim, dtype)`.
    """
    size = chunk_bytes(precision, head_dim, dtype)
    right = chunk.dtype == torch.uint8 and chunk.shape[-1] == size
    require(right, "chunk", f"{chunk.dtype} {tuple(chunk.shape)}", f"torch.uint8 [..., {size}]")
    if precision == "bf16":
        k, v = chunk.view(dtype).unflatten(-1, (2, PAGE_TOKENS, head_dim)).unbind(-3)
        return ChunkView(k=k, v=v)
    codes = PAGE_TOKENS * head_dim if precision == "kv8" else PAGE_TOKENS * head_dim // 2
    numbers = INT8_METADATA if precision == "kv8" else INT4_METADATA
    metadata = chunk[..., 2 * codes :].view(torch.float16).unflatten(-1, (PAGE_TOKENS, numbers))
    parts = {"k_codes": chunk[..., :codes], "v_codes": chunk[..., codes : 2 * codes]}
    if precision == "kv8":
        return ChunkView(**parts, k_scale=metadata[..., 0], v_scale=metadata[..., 1])
    fields = ("k_scale", "k_offset", "v_scale", "v_offset")
    return ChunkView(**parts, **dict(zip(fields, metadata.unbind(-1), strict=True)))
