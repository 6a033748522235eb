"""The `cuda` backend: kernels/cuda on Hopper. One `write_kv` and one `decode` launch a layer, one `plan` a step.

Host side only: argument structures, workspaces and launches. What the kernels compute is `attention/reference.py`;
how, kernels/README.md. Every launch goes to the current stream, synchronises nothing and can be captured in a graph.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kv4rl.attention import jit
from kv4rl.attention.backends import BackendUnavailable, ReferenceBackend, explain
from kv4rl.attention.triton import TritonBackend
from kv4rl.config import require
from kv4rl.formats.packing import chunk_bytes

CHUNK_WEIGHT = 192  # pages (3,072 tokens) a work item holds at most, until a request has MAX_CHUNKS of them
MAX_CHUNKS = 32  # schedule.cuh: kMaxChunks
UNIT_BYTES = 32  # schedule.cuh: Unit
QUERY_TAIL = 16  # layout.cuh: bytes after the codes of a prepared query row
SHARED_BYTES = 228 * 1024  # of a Hopper multiprocessor; each block costs 1 KB beyond its own
INPUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
PRECISION_CODES = {"kv4": 0, "kv4rl": 0, "kv8": 1, "bf16": 2}

_pointer, _int, _int64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def _fields(kind, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class WriteArguments(ctypes.Structure):
    """write_kv.cu."""

    _fields_ = [
        *_fields(_pointer, "q k v"),
        *_fields(_int64, "q_stride k_stride v_stride"),
        *_fields(_pointer, "query pages side_k side_v side_k_scale side_v_scale page_ids offsets slots side_entries"),
        *_fields(_int, "tokens query_heads kv_heads entries precision input_type"),
    ]


class PlanArguments(ctypes.Structure):
    """plan.cu."""

    _fields_ = [
        *_fields(_pointer, "context_tokens slots units counters"),
        *_fields(_int, "rows sink recent chunk_weight"),
    ]


class DecodeArguments(ctypes.Structure):
    """decode.cuh."""

    _fields_ = [
        *_fields(_pointer, "query pages page_table side_k side_v side_k_scale side_v_scale out lse"),
        *_fields(_pointer, "units counters partial arrivals"),
        ("page_table_stride", _int64),
        *_fields(_int, "kv_heads group sink recent out_type"),
        ("score_scale", ctypes.c_float),
    ]


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _require_dense_heads(name: str, x: torch.Tensor) -> None:
    dense = x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
    require(dense, f"{name}.stride", tuple(x.stride()), "heads and channels dense: (any, head_dim, 1)")


def _require_dense(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    right = x.is_cuda and x.is_contiguous() and x.dtype == dtype and tuple(x.shape) == shape
    found = f"{x.dtype} {tuple(x.shape)} on {x.device}, strides {tuple(x.stride())}"
    require(right, name, found, f"{dtype} {shape} on CUDA, contiguous")


def write_kv(cache, layer: int, q, k, v, where) -> torch.Tensor | None:
    """One launch: store k, v [N, kv_heads, d] at `where`; prepare q [N, query_heads, d]. q, or k and v, may be None.

    Returns the prepared queries, uint8 [N, query_heads, d + 16] (INT8 codes of the rotated query, FP32 scale, FP32 sum
    of codes; layout.cuh), or for `bf16` [N, query_heads, 2*d + 16] (the elements); None without q.
    """
    shape, given = cache.shape, q if q is not None else k
    arguments = WriteArguments(
        tokens=len(given),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        entries=cache.side.entries,
        precision=PRECISION_CODES[cache.kv.precision],
        input_type=INPUT_TYPES[given.dtype],
    )
    prepared = None
    if q is not None:
        _require_dense_heads("q", q)
        row = shape.head_dim * (2 if cache.kv.precision == "bf16" else 1) + QUERY_TAIL
        prepared = torch.empty(*q.shape[:2], row, dtype=torch.uint8, device=q.device)
        arguments.q, arguments.q_stride, arguments.query = q.data_ptr(), q.stride(0), prepared.data_ptr()
    if k is not None:
        for name, x in (("k", k), ("v", v)):
            _require_dense_heads(name, x)
            setattr(arguments, name, x.data_ptr())
            setattr(arguments, f"{name}_stride", x.stride(0))
        arguments.pages = cache.main.storage[layer].data_ptr()
        for name in ("page_ids", "offsets", "slots", "side_entries"):
            setattr(arguments, name, getattr(where, name).contiguous().data_ptr())
        if cache.side.entries:
            _point_at_side(arguments, cache, layer)
    library = jit.build("write_kv", HEAD_DIM=shape.head_dim)
    jit.check(library.launch_write_kv(ctypes.byref(arguments), _stream()), "write_kv")
    return prepared


def _point_at_side(arguments, cache, layer: int) -> None:
    side = cache.side
    arguments.side_k, arguments.side_v = side.k_codes[layer].data_ptr(), side.v_codes[layer].data_ptr()
    arguments.side_k_scale, arguments.side_v_scale = side.k_scale[layer].data_ptr(), side.v_scale[layer].data_ptr()


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


@lru_cache
def decode_kernel(
    precision: str, head_dim: int, group: int, dtype: torch.dtype, entries: int, tuning: Tuning | None = None
) -> Kernel:
    """Build and describe the decode kernel of a precision and head shape, with `entries` side-buffer positions.

    Wide heads hold more output in registers and have larger pages: fewer blocks and one page at a time then.
    """
    query_tiles = 1 if group <= 8 else 2
    size = query_tiles * head_dim
    tuning = tuning or TUNING[precision]
    if size > 128:
        tuning = Tuning(tuning.warps, 2 if size == 256 else 1, 1)
    name, defines = KERNELS[precision], {"HEAD_DIM": head_dim, "QUERY_TILES": query_tiles, "WARPS": tuning.warps}
    if name == "decode_int4":
        defines["PROTECTED"] = precision == "kv4rl"
    if name == "decode_bf16":
        defines["BF16"] = dtype == torch.bfloat16
    for blocks in range(tuning.blocks, 0, -1):
        stages = ring_stages(precision, head_dim, group, dtype, entries, tuning.warps, blocks)
        if stages >= 3 or blocks == 1:
            break
    defines |= {"BLOCKS": blocks, "STAGES": max(stages, 2), "TILES": tuning.tiles}
    library = jit.build(name, **defines)
    shared, grid = _int(), _int()
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


class DecodePlan:
    """Workspace and schedule of decode steps of at most `max_rows` requests of at most `max_pages` pages.

    `plan(batch)` once a step, then `run(layer, ...)` for each layer. Both only launch: capture them in one graph and
    replay it for any lengths, padding rows (context 0) included. The memory never moves or grows.
    """

    def __init__(self, cache, max_rows: int, max_pages: int):
        shape, kv = cache.shape, cache.kv
        self.cache = cache
        self.limits = (max_rows, max_pages)
        self.regions = (kv.sink_tokens, kv.recent_tokens) if kv.protected_tokens else (0, 0)
        weight = max_pages + 2 * -(-sum(self.regions) // 16)  # upper bound on what tiles_of() weighs
        chunks = max(1, min(MAX_CHUNKS, -(-weight // CHUNK_WEIGHT)))
        self.kernel = decode_kernel(kv.precision, shape.head_dim, shape.group, shape.dtype, cache.side.entries)
        device = cache.device
        self.units = torch.empty(max_rows * chunks * UNIT_BYTES, dtype=torch.uint8, device=device)
        self.counters = torch.zeros(4, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(max_rows * shape.kv_heads, dtype=torch.int32, device=device)
        partials = max_rows * chunks if chunks > 1 else 0
        self.partial = torch.empty(partials * shape.query_heads * (shape.head_dim + 4), device=device)
        self.batch = None

    def fits(self, batch) -> bool:
        """Whether the batch is within the limits this plan was made for."""
        rows, pages = batch.page_table.shape
        return rows <= self.limits[0] and pages <= self.limits[1]

    def plan(self, batch) -> None:
        """Divide the batch into work items, on the device. Raises `ValueError` beyond the plan's limits."""
        require(self.fits(batch), "page_table.shape", tuple(batch.page_table.shape), f"at most {self.limits}")
        self.batch = batch
        context, slots = batch.context_tokens.contiguous(), batch.slots.contiguous()
        arguments = PlanArguments(
            context_tokens=context.data_ptr(),
            slots=slots.data_ptr(),
            units=self.units.data_ptr(),
            counters=self.counters.data_ptr(),
            rows=len(context),
            sink=self.regions[0],
            recent=self.regions[1],
            chunk_weight=CHUNK_WEIGHT,
        )
        jit.check(jit.build("plan").launch_plan(ctypes.byref(arguments), _stream()), "plan")

    def run(self, layer: int, prepared: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Attention of the planned batch in one layer: out [rows, query_heads, d]; lse FP32 [rows, query_heads]."""
        cache, table = self.cache, self.batch.page_table
        require(table.stride(1) == 1, "page_table.stride", table.stride(), "a dense last dimension")
        heads = (len(table), cache.shape.query_heads)
        _require_dense("prepared", prepared, torch.uint8, (*heads, prepared.shape[-1]))
        _require_dense("out", out, out.dtype, (*heads, cache.shape.head_dim))
        if lse is not None:
            _require_dense("lse", lse, torch.float32, heads)
        arguments = DecodeArguments(
            query=prepared.data_ptr(),
            pages=cache.main.storage[layer].data_ptr(),
            page_table=table.data_ptr(),
            out=out.data_ptr(),
            lse=None if lse is None else lse.data_ptr(),
            units=self.units.data_ptr(),
            counters=self.counters.data_ptr(),
            partial=self.partial.data_ptr(),
            arrivals=self.arrivals.data_ptr(),
            page_table_stride=table.stride(0),
            kv_heads=cache.shape.kv_heads,
            group=cache.shape.group,
            sink=self.regions[0],
            recent=self.regions[1],
            out_type=INPUT_TYPES[out.dtype],
            score_scale=math.log2(math.e) / math.sqrt(cache.shape.head_dim),
        )
        if cache.side.entries:
            _point_at_side(arguments, cache, layer)
        kernel = self.kernel
        error = kernel.launch(ctypes.byref(arguments), kernel.shared_bytes, kernel.blocks, _stream())
        jit.check(error, kernel.name)


class CudaBackend:
    """`attention.backends.Backend` over the kernels of kernels/cuda."""

    name = "cuda"

    def __init__(self):
        self._plans: dict[int, list[DecodePlan]] = {}  # by cache; older, smaller ones stay: a graph may hold them
        self._current: tuple | None = None

    def write(self, cache, layer, k, v, where):
        write_kv(cache, layer, None, k, v, where)

    def decode(self, cache, layer, q, batch, return_lse=False):
        if cache.kv.precision == "bf16" and q.dtype == torch.float32:
            explain("decode of FP32 pages runs on the reference: the tensor cores take 16-bit elements")
            return ReferenceBackend().decode(cache, layer, q, batch, return_lse)
        if cache.kv.probability_operand == "u8":
            explain("decode with 8-bit probabilities runs on the Triton kernels: the CUDA kernels use FP16")
            return TritonBackend().decode(cache, layer, q, batch, return_lse)
        prepared = write_kv(cache, layer, q, None, None, None)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        self._planned(cache, layer, batch).run(layer, prepared, out, lse)
        return (out, lse) if return_lse else out

    def _planned(self, cache, layer: int, batch) -> DecodePlan:
        """The plan of this step: made anew for a new batch, a changed one, or when the layers start over."""
        versions = (batch.context_tokens._version, batch.page_table._version, batch.slots._version)
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
            if plan.cache is cache and plan.fits(batch):
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
    return CudaBackend()
