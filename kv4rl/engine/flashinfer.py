"""FlashInfer's tensor-core decode as a cache backend: the paper's BF16 baseline, in our engine (§A.2).

It reads the pages where our `write_kv` puts them: a chunk holds K then V, so both are strided views of one storage.
FlashInfer divides its work on the host, once a step (`prepare`); a captured step reads that division from memory, one
wrapper a batch bucket. Over `kv8` storage the same backend keeps FP8 keys and values instead (Fig. A2 "FP8 KV8").
"""

import math
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from kv4rl.attention.backends import BackendUnavailable
from kv4rl.attention.cuda import make_backend
from kv4rl.cache.kv_cache import KVCache
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import PAGE_TOKENS, require
from kv4rl.engine.transfer import upload

WORKSPACE_BYTES = 512 << 20
FP8 = torch.float8_e4m3fn


def import_flashinfer() -> ModuleType:
    """The library. Raises `BackendUnavailable`, with what to do, where it or the builder of its kernels is missing."""
    try:
        import flashinfer
    except ImportError as missing:
        reason = "FlashInfer is not installed: pip install -e '.[gpu]', or use our own kernel (backend='cuda')"
        raise BackendUnavailable(reason) from missing
    _find_ninja()
    return flashinfer


def _find_ninja() -> None:
    """FlashInfer starts `ninja` by name: pip's lies beside a Python whose environment may not be active."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja") is None:
        if not (beside / "ninja").exists() and find_spec("flashinfer_jit_cache") is None:  # which holds built kernels
            raise BackendUnavailable(
                "FlashInfer builds its kernels with ninja, which is not on PATH: pip install ninja"
            )
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), str(beside)))


class FlashInferBackend:
    """`attention.backends.Backend` and `engine.decode_step.PlannedOnHost` for one cache of precision `bf16`.

    `fp8=True` takes a cache of precision `kv8` for its page size and stores E4M3 there, scale 1, unrotated keys; its
    steps must not be padded (the replay's are not).
    """

    name = "flashinfer"

    def __init__(self, cache: KVCache, *, fp8: bool = False):
        wanted = "kv8" if fp8 else "bf16"
        require(cache.kv.precision == wanted, "precision", cache.kv.precision, f"{wanted} for FlashInfer")
        half = cache.shape.dtype in (torch.bfloat16, torch.float16)
        require(half, "dtype", cache.shape.dtype, "bfloat16 or float16 for FlashInfer")
        self._flashinfer, self._ours = import_flashinfer(), make_backend(cache.device)
        self._dtype = FP8 if fp8 else cache.shape.dtype
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        most = cache.allocator.num_pages + cache.num_slots  # a padding row names a page once more
        self._indices = torch.zeros(most, dtype=torch.int32, device=cache.device)
        self._captured: dict[int, object] = {}  # rows -> wrapper whose buffers a graph reads
        self._free = self._wrapper(None, cache.device)  # for steps that are not captured
        self._planned = None
        # FlashInfer divides in pinned memory of its own, which the copy of the step before may still read.
        self._copied = torch.cuda.Event() if cache.device.type == "cuda" else None

    def prepare(self, cache: KVCache, contexts: np.ndarray, page_ids: np.ndarray, *, static: bool = True) -> None:
        """Divide the step's work; `static`: into the buffers of this number of rows, for a graph.

        A padding row attends to one token that exists: FlashInfer counts rows without pages in two ways.
        """
        padding = (contexts == 0)[:, None]
        contexts, page_ids = np.maximum(contexts, 1), np.where(padding, max(int(page_ids[0, 0]), 0), page_ids)
        held = pages_for(contexts).astype(np.int32)
        starts = np.concatenate(([0], held.cumsum())).astype(np.int32)
        ids = page_ids[np.arange(page_ids.shape[1]) < held[:, None]].astype(np.int32)
        last = ((contexts - 1) % PAGE_TOKENS + 1).astype(np.int32)
        rows = len(contexts)
        if static and rows not in self._captured:
            self._captured[rows] = self._wrapper(rows, cache.device)
        self._planned = self._captured[rows] if static else self._free
        if self._copied is not None:
            self._copied.synchronize()
        shape = cache.shape
        self._planned.plan(
            torch.from_numpy(starts), upload(ids, cache.device), torch.from_numpy(last), shape.query_heads,
            shape.kv_heads, shape.head_dim, PAGE_TOKENS, q_data_type=shape.dtype, kv_data_type=self._dtype,
        )  # fmt: skip
        if self._copied is not None:
            self._copied.record()

    def write(self, cache, layer, k, v, where):
        if self._dtype != FP8:
            self._ours.write(cache, layer, k, v, where)
            return
        keys, values = (x.view(torch.uint8) for x in self._pages(cache, layer))
        keys[where.page_ids, :, where.offsets] = k.to(FP8).view(torch.uint8)
        values[where.page_ids, :, where.offsets] = v.to(FP8).view(torch.uint8)

    def takes_raw(self, cache) -> bool:
        """As our own precisions, so that the baseline launches as little between its products as they do."""
        return self._dtype != FP8 and hasattr(self._ours, "turn_and_write")

    def write_and_decode(self, cache, layer, q, k, v, where, batch, return_lse=False, before=None):
        if before is None:
            self.write(cache, layer, k, v, where)
        else:
            q = self._ours.turn_and_write(cache, layer, q, k, v, where, before)
        return self.decode(cache, layer, q, batch, return_lse)

    def decode(self, cache, layer, q, batch, return_lse=False):
        pages, q = self._pages(cache, layer), q.contiguous()
        if not return_lse:
            return self._planned.run(q, pages)
        out, lse = self._planned.run(q, pages, return_lse=True)
        return out, lse * math.log(2)  # FlashInfer's is in base 2

    def _pages(self, cache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, each [pages, kv_heads, 16, d], strided views of the chunks."""
        storage, d = cache.main.storage[layer], cache.shape.head_dim
        elements = storage[..., : 2 * PAGE_TOKENS * d * self._dtype.itemsize].view(self._dtype)
        pages = elements.unflatten(-1, (2, PAGE_TOKENS, d))
        return pages[:, :, 0], pages[:, :, 1]

    def _wrapper(self, rows: int | None, device: torch.device):
        buffers = {}
        if rows is not None:
            counts = [torch.zeros(n, dtype=torch.int32, device=device) for n in (rows + 1, rows)]
            buffers = {
                "use_cuda_graph": True, "paged_kv_indptr_buffer": counts[0],
                "paged_kv_last_page_len_buffer": counts[1], "paged_kv_indices_buffer": self._indices,
            }  # fmt: skip
        kind = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        return kind(self._workspace, "HND", use_tensor_cores=True, backend="fa2", **buffers)
