"""Unquantised causal attention over packed sequences: what prefill, training and evaluation use."""

import inspect
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from kv4rl.config import require

# Later releases of torch want grouped queries announced; 2.11 takes them as they come and has no such argument.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class PackedCausal:
    """`attend` of a decoder whose rows are whole sequences, one after another: row i sees its sequence up to itself.

    cu_seqlens: [sequences + 1] row offsets, from 0 to the number of rows, as a tensor or a list.
    """

    def __init__(self, cu_seqlens):
        self.bounds = [int(offset) for offset in cu_seqlens]
        ordered = all(start <= stop for start, stop in pairwise(self.bounds))
        require(bool(self.bounds) and self.bounds[0] == 0 and ordered, "cu_seqlens", self.bounds, "0, then ascending")
        self._device_bounds = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, query_heads, d], k and v [N, kv_heads, d] -> [N, query_heads, d]."""
        require(q.shape[0] == self.bounds[-1], "rows", q.shape[0], f"{self.bounds[-1]}, the end of cu_seqlens")
        if _flashes(q):
            return self._flash(q, k, v)
        chunks = [causal_chunk(q[a:b], k[a:b], v[a:b], 0) for a, b in pairwise(self.bounds) if b > a]
        return torch.cat(chunks) if chunks else torch.empty_like(q)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._device_bounds is None:
            bounds = torch.tensor(self.bounds, dtype=torch.int32, pin_memory=True)
            self._device_bounds = bounds.to(q.device, non_blocking=True)  # else the host waits for the device here
        longest = max(b - a for a, b in pairwise(self.bounds))
        bounds = self._device_bounds
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), **GROUPED)


def _flashes(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def causal_chunk(q: Tensor, k_all: Tensor, v_all: Tensor, start: int) -> Tensor:
    """Attention of rows `start, start + 1, …` of one sequence over its keys so far.

    q: [n, query_heads, d]; k_all, v_all: [start + n, kv_heads, d]. Returns [n, query_heads, d].
    """
    rows, keys = q.shape[0], k_all.shape[0]
    require(keys == start + rows, "k_all rows", keys, f"start + rows = {start + rows}")
    if _flashes(q):  # aligns the last query with the last key; a mask would have every score written to memory
        ends = (torch.arange(0, 2 * count, count, dtype=torch.int32, device=q.device) for count in (rows, keys))
        return varlen_attn(q, k_all, v_all, *ends, rows, keys, window_size=(-1, 0), **GROUPED)
    mask = None
    if start > 0 and rows > 1:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(start)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k_all.transpose(0, 1)[None],
        v_all.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=start == 0 and rows > 1,
        enable_gqa=q.shape[1] != k_all.shape[1],
    )
    return out[0].transpose(0, 1)
