"""The `cuda` backend: kernels/cuda on Hopper. One `write_kv` and one `decode` launch a layer, one `plan` a step.

Host side only: argument structures, workspaces and launches. What the kernels compute is `attention/reference.py`;
how, kernels/README.md. Every launch goes to the current stream of the cache's device, synchronises nothing and can be
captured in a graph.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from kv4rl.attention import jit
from kv4rl.attention.backends import BackendUnavailable, ReferenceBackend, explain
from kv4rl.attention.cuda_arguments import (
    QUERY_TAIL,
    Workspace,
    decode_arguments,
    plan_arguments,
    prepared_queries,
    write_arguments,
    write_defines,
)
from kv4rl.config import require, require_integer
from kv4rl.formats.packing import chunk_bytes

SHARED_BYTES = 228 * 1024  # of a Hopper multiprocessor; each block costs 1 KB beyond its own

_int = ctypes.c_int


def _launch(what: str, launch, device: torch.device, *arguments) -> None:
    """Launch on the current stream of `device`, which the runtime wants to be the current device as well."""
    with torch.cuda.device(device.index):
        stream = ctypes.c_void_p(torch.cuda.current_stream(device.index).cuda_stream)
        jit.check(launch(*arguments, stream), what)


def _require_cuda(device: torch.device) -> None:
    require(device.type == "cuda", "the cache's device", str(device), "a CUDA device: these are its kernels")


def write_kv(cache, layer: int, q, k, v, where, before=None, prepared=None) -> torch.Tensor | None:
    """One launch: store k, v [N, kv_heads, d] at `where`; prepare q [N, query_heads, d]. q, or k and v, may be None.

    `before` (model/pointwise.py: NormRotate): QK-norm and RoPE that q and k still need. Returns the prepared queries,
    uint8 [N, query_heads, d + 16] (INT8 codes of the rotated query, FP32 scale, FP32 sum of codes; layout.cuh), or for
    `bf16` [N, query_heads, 2*d + 16] (the elements); None without q. `prepared`: where to put them. Raises
    `ValueError`, naming the tensor, for what does not fit the cache.
    """
    _require_cuda(cache.device)
    if q is not None and prepared is None:
        prepared = prepared_queries(cache, q)
    arguments = write_arguments(cache, layer, q, k, v, where, prepared, before)
    library = jit.build("write_kv", **write_defines(cache, before, where))
    _launch("write_kv", library.launch_write_kv, cache.device, ctypes.byref(arguments))
    return prepared


@dataclass(frozen=True)
class Kernel:
    """One built configuration of a decode kernel and its launch shape."""

    launch: object
    name: str
    shared_bytes: int
    blocks: int


KERNELS = {"kv4": "decode_int4", "kv4rl": "decode_int4", "kv8": "decode_int8", "bf16": "decode_bf16"}


@dataclass(frozen=True)
class Tuning:
    """How a decode kernel fills a multiprocessor; kernels/README.md has the figures of those tried."""

    warps: int  # attending warps of a block, beside the one that streams pages
    blocks: int  # resident on a multiprocessor
    tiles: int  # pages a warp works on at once


TUNING = {"kv4": Tuning(4, 3, 2), "kv4rl": Tuning(4, 3, 2), "kv8": Tuning(4, 2, 1), "bf16": Tuning(4, 2, 1)}
BYTES_TUNING = Tuning(4, 2, 2)  # 8-bit P: more registers


@lru_cache
def decode_kernel(
    precision: str, head_dim: int, group: int, dtype: torch.dtype, entries: int, device: torch.device,
    operand: str = "fp16", tuning: Tuning | None = None,
) -> Kernel:  # fmt: skip
    """Build the decode kernel of a precision and head shape, with `entries` side-buffer positions; describe it on
    `device`, whose multiprocessors count, and which allows the kernel its shared memory.

    Wide heads hold more output in registers and have larger pages: fewer blocks and one page at a time then.
    """
    _require_cuda(device)
    query_tiles = 1 if group <= 8 else 2
    size = query_tiles * head_dim
    tuning = tuning or (BYTES_TUNING if operand == "u8" else TUNING[precision])
    if size > 128:
        tuning = Tuning(tuning.warps, 2 if size == 256 else 1, 1)
    name, defines = KERNELS[precision], {"HEAD_DIM": head_dim, "QUERY_TILES": query_tiles, "WARPS": tuning.warps}
    if name == "decode_int4":
        defines |= {"PROTECTED": precision == "kv4rl", "BYTES": operand == "u8"}
    if name == "decode_bf16":
        defines["BF16"] = dtype == torch.bfloat16
    for blocks in range(tuning.blocks, 0, -1):
        stages = ring_stages(precision, head_dim, group, dtype, entries, tuning.warps, blocks)
        if stages >= 3 or blocks == 1:
            break
    defines |= {"BLOCKS": blocks, "STAGES": max(stages, 2), "TILES": tuning.tiles}
    library = jit.build(name, **defines)
    shared, grid = _int(), _int()
    with torch.cuda.device(device.index):
        error = getattr(library, f"describe_{name}")(group, entries, ctypes.byref(shared), ctypes.byref(grid))
    jit.check(error, name)
    require(grid.value > 0, "sink_tokens + recent_tokens", entries, "fewer: their scales must fit in shared memory")
    return Kernel(getattr(library, f"launch_{name}"), name, shared.value, grid.value)


def ring_stages(precision, head_dim, group, dtype, entries, warps: int, blocks: int) -> int:
    """Rows of pages that fit beside a block's other shared memory (Config::bytes of decode.cuh), at most 16.

    Group and entries are rounded up, so that few builds serve all of them.
    """
    group, entries = 4 if group <= 4 else 8 if group <= 8 else 16, -(-entries // 256) * 256
    row = head_dim * (2 if precision == "bf16" else 1) + QUERY_TAIL
    queries = 2 * (8 if group <= 8 else 16) * row
    merge = warps * group * (head_dim + 4) * 4
    scales = 2 * -(-entries // 16) * 64
    left = SHARED_BYTES // blocks - 1024 - 512 - queries - merge - scales
    return min(16, left // (warps * chunk_bytes(precision, head_dim, dtype) + 16))


def takes_pages(cache) -> bool:
    """Whether the decode kernels read the cache's pages: not FP32 elements."""
    return not (cache.kv.precision == "bf16" and cache.shape.dtype == torch.float32)


class DecodePlan:
    """Workspace and schedule of decode steps of at most `max_rows` requests of at most `max_pages` pages.

    `plan(batch)` once a step, then `run(layer, ...)` for each layer. Both only launch: capture them in one graph and
    replay it for any lengths, padding rows (context 0) included. The memory never moves or grows.
    """

    def __init__(self, cache, max_rows: int, max_pages: int, chunk_weight: int | None = None):
        shape = cache.shape
        require_integer(max_rows, "max_rows", 1)
        require_integer(max_pages, "max_pages", 0)
        if chunk_weight is not None:
            require_integer(chunk_weight, "chunk_weight", 1)
        require(takes_pages(cache), "dtype of bf16 pages", shape.dtype, "16-bit elements: tensor cores take those")
        self.cache = cache
        self.workspace = Workspace(cache, max_rows, max_pages, chunk_weight)
        self.kernel = decode_kernel(
            cache.kv.precision, shape.head_dim, shape.group, shape.dtype, cache.side.entries, cache.device,
            cache.kv.probability_operand,
        )  # fmt: skip
        self.batch = None

    def plan(self, batch) -> None:
        """Divide the batch into work items, on the device.

        Raises `ValueError` for a batch beyond the plan's limits, or as `KVCache.decode` does.
        """
        space = self.workspace
        batch.check(len(batch.context_tokens), self.cache.limits)
        require(space.fits(batch), "page_table.shape", tuple(batch.page_table.shape), f"at most {space.limits}")
        self.batch = batch
        arguments = plan_arguments(self.cache, batch, space.units, space.counters, space.chunk_weight)
        _launch("plan", jit.build("plan").launch_plan, self.cache.device, ctypes.byref(arguments))

    def run(self, layer: int, prepared: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Attention of the planned batch in one layer: out [rows, query_heads, d]; lse FP32 [rows, query_heads].

        Raises `ValueError` before `plan`, and for tensors of the wrong shape, dtype, device or stride.
        """
        space, kernel = self.workspace, self.kernel
        require(self.batch is not None, "planned batch", self.batch, "plan(batch) before run(...)")
        arguments = decode_arguments(
            self.cache, layer, self.batch, prepared, out, lse,
            space.units, space.counters, space.partial, space.arrivals,
        )  # fmt: skip
        device = self.cache.device
        _launch(kernel.name, kernel.launch, device, ctypes.byref(arguments), kernel.shared_bytes, kernel.blocks)


class CudaBackend:
    """`attention.backends.Backend` over the kernels of kernels/cuda."""

    name = "cuda"

    def __init__(self):
        self._plans: dict[int, list[DecodePlan]] = {}  # by cache; older, smaller ones stay: a graph may hold them
        self._current: tuple | None = None

    def write(self, cache, layer, k, v, where):
        write_kv(cache, layer, None, k, v, where)

    def turn_and_write(self, cache, layer, q, k, v, where, before) -> torch.Tensor:
        """As `write` to `bf16` pages, of a k that still needs `before`; returns q after it, for another decode."""
        turned = torch.empty_like(q, memory_format=torch.contiguous_format)
        write_kv(cache, layer, q, k, v, where, before, turned.view(torch.uint8))
        return turned

    def decode(self, cache, layer, q, batch, return_lse=False):
        if not self.takes_raw(cache):
            explain("decode of FP32 pages runs on the reference: the tensor cores take 16-bit elements")
            return ReferenceBackend().decode(cache, layer, q, batch, return_lse)
        prepared = write_kv(cache, layer, q, None, None, None)
        return self._attend(cache, layer, q, prepared, batch, return_lse)

    def takes_raw(self, cache) -> bool:
        """All but FP32 pages, whose decode is not ours."""
        return takes_pages(cache)

    def write_and_decode(self, cache, layer, q, k, v, where, batch, return_lse=False, before=None):
        """As `write`, then `decode`; the token's q, k and v go through one launch of `write_kv`."""
        if not self.takes_raw(cache):
            self.write(cache, layer, k, v, where)
            return self.decode(cache, layer, q, batch, return_lse)
        prepared = write_kv(cache, layer, q, k, v, where, before)
        return self._attend(cache, layer, q, prepared, batch, return_lse)

    def _attend(self, cache, layer, q, prepared, batch, return_lse=False):
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        self._planned(cache, layer, batch).run(layer, prepared, out, lse)
        return (out, lse) if return_lse else out

    def _planned(self, cache, layer: int, batch) -> DecodePlan:
        """The plan of this step: made anew for a new batch, a changed one, or when the layers start over."""
        versions = batch.versions()
        if self._current is not None:
            plan, planned, seen, last = self._current
            if plan.cache is cache and planned is batch and seen == versions and layer > last:
                self._current = (plan, batch, versions, layer)
                return plan
        plan = self._plan_for(cache, batch)
        plan.plan(batch)
        self._current = (plan, batch, versions, layer)
        return plan

    def _plan_for(self, cache, batch) -> DecodePlan:
        plans = self._plans.setdefault(id(cache), [])
        for plan in plans:
            if plan.cache is cache and plan.workspace.fits(batch):
                return plan
        rows, pages = batch.page_table.shape
        plans.insert(0, DecodePlan(cache, max(rows, cache.num_slots), pages))
        return plans[0]


def make_backend(device: torch.device) -> CudaBackend:
    """The backend on `device`. Raises `BackendUnavailable`, saying why and what to do, where it cannot run."""
    if device.type != "cuda":
        raise BackendUnavailable(f"it needs a CUDA device, this cache is on {device}: use backend='reference'")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        raise BackendUnavailable(
            f"it is built for Hopper (sm_90), this device is sm_{capability[0]}{capability[1]}: use backend='triton'"
        )
    jit.compiler()
    jit.build("plan")  # the smallest, and needed anyway: shows now, while there is a way back, whether nvcc can
    return CudaBackend()
