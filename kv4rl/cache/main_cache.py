"""The main cache: every position of every request, in pages of 16 tokens (§5.1, §A.3 "Encoding and allocation")."""

import math

import torch

from kv4rl.config import PAGE_TOKENS, InputError, KVConfig, require
from kv4rl.formats.affine import AffineCodes, dequantize_affine, quantize_affine
from kv4rl.formats.packing import (
    ChunkView,
    chunk_bytes,
    pack_k4,
    pack_k8,
    pack_v4,
    pack_v8,
    split_chunk,
    unpack_k4,
    unpack_k8,
    unpack_v4,
    unpack_v8,
)
from kv4rl.formats.symmetric import SymmetricCodes, dequantize_symmetric, quantize_symmetric


class MainCache:
    """Pages of one KV cache, one contiguous chunk per (layer, page, KV head); `formats/packing.py` lays a chunk out.

    `kv4` and `kv4rl` store affine INT4, `kv8` symmetric INT8, both with keys already rotated (Eq. 3.4); `bf16` stores
    the model's own `dtype` and unrotated keys.
    """

    def __init__(self, kv: KVConfig, *, num_layers: int, num_pages: int, kv_heads: int, head_dim: int, dtype, device):
        require(num_layers >= 1, "num_layers", num_layers, "an integer >= 1")
        require(num_pages >= 0, "num_pages", num_pages, "an integer >= 0")
        require(kv_heads >= 1, "kv_heads", kv_heads, "an integer >= 1")
        self.precision = kv.precision
        self.head_dim = head_dim
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes(kv.precision, head_dim, dtype)
        shape = (num_layers, num_pages, kv_heads, self.chunk_bytes)
        self.storage = _zeros(shape, device)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def bytes_per_page(self) -> int:
        """One 16-token page over all layers and KV heads (b_q of §A.2)."""
        layers, _, kv_heads, chunk = self.storage.shape
        return layers * kv_heads * chunk

    def pages(self, layer: int, page_ids: torch.Tensor) -> ChunkView:
        """A gathered copy of pages: fields [P, kv_heads, ...] for `page_ids` int64 [P]."""
        return self._split(self.storage[layer].index_select(0, page_ids))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, page_ids: torch.Tensor, offsets: torch.Tensor):
        """Store k, v [N, kv_heads, d] at (page_ids, offsets), int64 [N], each place at most once.

        Two codes share a byte, so quantised pages are unpacked, changed and packed again as a whole.
        """
        if self.precision == "bf16":
            view = self._split(self.storage[layer])
            view.k[page_ids, :, offsets] = k
            view.v[page_ids, :, offsets] = v
            return
        touched, row = page_ids.unique(return_inverse=True)
        chunks = self.storage[layer].index_select(0, touched)
        view = self._split(chunks)
        place = (row, slice(None), offsets)
        if self.precision == "kv8":
            _replace(view.k_codes, pack_k8, unpack_k8, place, k8 := quantize_symmetric(k))
            _replace(view.v_codes, pack_v8, unpack_v8, place, v8 := quantize_symmetric(v))
            view.k_scale[place], view.v_scale[place] = k8.scale, v8.scale
        else:
            _replace(view.k_codes, pack_k4, unpack_k4, place, k4 := quantize_affine(k))
            _replace(view.v_codes, pack_v4, unpack_v4, place, v4 := quantize_affine(v))
            view.k_scale[place], view.v_scale[place] = k4.scale.squeeze(-1), v4.scale.squeeze(-1)
            view.k_offset[place], view.v_offset[place] = k4.offset.squeeze(-1), v4.offset.squeeze(-1)
        self.storage[layer].index_copy_(0, touched, chunks)

    def read(self, layer: int, page_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised pages, (k, v) each float32 [P, kv_heads, 16, d]; keys in the basis they are stored in."""
        view = self.pages(layer, page_ids)
        if self.precision == "bf16":
            return view.k.float(), view.v.float()
        if self.precision == "kv8":
            k8 = SymmetricCodes(unpack_k8(view.k_codes), view.k_scale)
            v8 = SymmetricCodes(unpack_v8(view.v_codes), view.v_scale)
            return dequantize_symmetric(k8), dequantize_symmetric(v8)
        k4 = AffineCodes(unpack_k4(view.k_codes), view.k_scale.unsqueeze(-1), view.k_offset.unsqueeze(-1))
        v4 = AffineCodes(unpack_v4(view.v_codes), view.v_scale.unsqueeze(-1), view.v_offset.unsqueeze(-1))
        return dequantize_affine(k4), dequantize_affine(v4)

    def _split(self, chunks: torch.Tensor) -> ChunkView:
        return split_chunk(chunks, self.precision, self.head_dim, self.dtype)


def _zeros(shape: tuple[int, ...], device) -> torch.Tensor:
    """Bytes of all pages. `InputError`, with their number, where the processor's memory lacks room.

    A GPU's `torch.OutOfMemoryError` passes: who plans its memory says more (`engine/memory.py`).
    """
    try:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, OverflowError) as error:  # "can't allocate", and sizes beyond 63 bits
        size, pages = math.prod(shape), shape[1]
        fewer = f"fewer pages or more memory: they need {size} bytes ({size / 1e9:.3g} GB) on {device}"
        raise InputError(f"cache pages={pages}: expected {fewer}") from error


def _replace(packed: torch.Tensor, pack, unpack, place: tuple, new: AffineCodes | SymmetricCodes) -> None:
    """Put `new` codes at `place` (page row, all heads, offset) of the packed bytes of some pages, in place."""
    codes = unpack(packed).contiguous()
    codes[place] = new.codes
    packed.copy_(pack(codes))


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` positions: ceil(tokens / 16), and none for none."""
    return -(-tokens // PAGE_TOKENS)
