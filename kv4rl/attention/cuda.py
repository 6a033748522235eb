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
from kv4rl.attention.backends import BackendUnavailable
from kv4rl.config import require

CHUNK_WEIGHT = 64  # pages (1,024 tokens) a work item holds at most, until a request has MAX_CHUNKS of them
MAX_CHUNKS = 32  # schedule.cuh: kMaxChunks
UNIT_BYTES = 32  # schedule.cuh: Unit
QUERY_TAIL = 16  # layout.cuh: bytes after the codes of a prepared query row
WARPS = 4  # attending warps of a block
SHARED_BYTES = 227 * 1024  # of a Hopper multiprocessor
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
        *_fields(_int, "kv_heads group sink recent ring_rows out_type"),
        ("score_scale", ctypes.c_float),
    ]


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _require_dense_heads(name: str, x: torch.Tensor) -> None:
    dense = x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
    require(dense, f"{name}.stride", tuple(x.stride()), "heads and channels dense: (any, head_dim, 1)")


def write_kv(cache, layer: int, q, k, v, where) -> torch.Tensor | None:
    """One launch: store k, v [N, kv_heads, d] at `where`; prepare q [N, query_heads, d]. q, or k and v, may be None.

    Returns the prepared queries, uint8 [N, query_heads, d + 16] (INT8 codes of the rotated query, FP32 scale, FP32 sum
    of codes; layout.cuh), or None without q.
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
        prepared = torch.empty(*q.shape[:2], shape.head_dim + QUERY_TAIL, dtype=torch.uint8, device=q.device)
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
    ring_rows: int
    shared_bytes: int
    blocks: int


@lru_cache
def decode_kernel(
    precision: str, head_dim: int, group: int, chunk_bytes: int, warps: int = WARPS, blocks: int | None = None
) -> Kernel:
    """Build and describe the decode kernel for a precision and head shape on the current device.

    blocks: per multiprocessor; None: 2, or 1 where the output of 16 heads of 256 channels fills the registers.
    """
    name = "decode_int8" if precision == "kv8" else "decode_int4"
    tiles = 1 if group <= 8 else 2
    blocks = blocks or (1 if tiles * head_dim >= 512 else 2)
    defines = {"HEAD_DIM": head_dim, "QUERY_TILES": tiles, "WARPS": warps, "BLOCKS": blocks}
    if name == "decode_int4":
        defines["PROTECTED"] = precision == "kv4rl"
    library = jit.build(name, **defines)
    shared, grid = _int(), _int()

    def describe(rows: int) -> int:
        error = getattr(library, f"describe_{name}")(rows, group, ctypes.byref(shared), ctypes.byref(grid))
        jit.check(error, f"{name} with {rows} ring rows")
        return grid.value

    rows = (SHARED_BYTES // blocks - 1024) // (warps * chunk_bytes)
    while rows > 2 and not _fits(describe, rows, blocks):
        rows -= 1
    return Kernel(getattr(library, f"launch_{name}"), name, rows, shared.value, grid.value)


def _fits(describe, rows: int, blocks: int) -> bool:
    try:
        return describe(rows) >= blocks * torch.cuda.get_device_properties().multi_processor_count
    except RuntimeError:  # more shared memory than a block may have
        return False


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
        self.kernel = decode_kernel(kv.precision, shape.head_dim, shape.group, cache.main.chunk_bytes)
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
            ring_rows=self.kernel.ring_rows,
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
