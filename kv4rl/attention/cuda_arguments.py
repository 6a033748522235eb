"""The argument structures of kernels/cuda, and how a cache's tensors fill them. Pointers only: nothing is launched."""

import ctypes
import math

import torch

from kv4rl.cache.batch import protected_widths
from kv4rl.config import require

GRADED_WEIGHT = 128  # schedule.cuh: kGradedWeight
FEW_ITEMS, FEW_WEIGHT = 1200, 140  # requests x KV heads: about three for each block of an H200; pages of theirs then
CHUNK_WEIGHTS = (16, 192)  # least and most pages (3,072 tokens) of a work item, until a request has MAX_CHUNKS of them
MAX_CHUNKS = 32  # schedule.cuh: kMaxChunks
UNIT_BYTES = 32  # schedule.cuh: Unit
QUERY_TAIL = 16  # layout.cuh: bytes after the codes of a prepared query row
WRITE_CHANNELS = 8  # vector.cuh: channels of a head that a lane of `write_kv` holds, 8 or 16
SUMS_TAIL = 4  # decode.cuh: floats after the D sums of a partial
INPUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
PRECISION_CODES = {"kv4": 0, "kv4rl": 0, "kv8": 1, "bf16": 2}

_pointer, _int, _int64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def _fields(kind, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class WriteArguments(ctypes.Structure):
    """write_kv.cu."""

    _fields_ = [
        *_fields(_pointer, "q k v query pages side_k side_v side_k_scale side_v_scale"),
        *_fields(_pointer, "page_ids offsets slots side_entries"),
        *_fields(_pointer, "q_weight k_weight cosines sines"),
        *_fields(_int, "q_stride k_stride v_stride query_row tokens query_heads kv_heads entries"),
        ("eps", ctypes.c_float),
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


def chunk_weight_of(num_slots: int, kv_heads: int) -> int:
    """Pages of a work item: few where few requests must fill the card, many where chunks would only cost merges.

    A constant of the cache, so that a request's bits depend on its own length alone, in any batch over that cache.
    """
    least, most = CHUNK_WEIGHTS
    items = num_slots * kv_heads
    return max(least, min(FEW_WEIGHT if items < FEW_ITEMS else most, 3 * items // 4))


def most_chunks(max_pages: int, regions: tuple[int, int], chunk_weight: int) -> int:
    """Upper bound on the chunks of a request of at most `max_pages` pages (schedule.cuh: chunk_count)."""
    weight = max_pages + 2 * -(-sum(regions) // 16)
    finer = 3 if chunk_weight < GRADED_WEIGHT else 2
    return 1 if weight <= chunk_weight else min(MAX_CHUNKS, -(-finer * weight // (2 * chunk_weight)))


def _require_dense(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple, cache, align: int = 16) -> None:
    """Words are made only for what is wrong: some of these tensors are of every layer."""
    require(isinstance(x, torch.Tensor), name, type(x).__name__, f"a tensor of {dtype} {shape}")
    right = x.is_contiguous() and x.dtype == dtype and x.shape == shape and x.device == cache.device
    if not right:
        found = f"{x.dtype} {tuple(x.shape)}, strides {tuple(x.stride())}, on {x.device}"
        require(False, name, found, f"{dtype} {shape}, contiguous, on {cache.device}")
    if x.data_ptr() % align:
        require(False, f"{name}.data_ptr()", x.data_ptr(), f"a multiple of {align}")


def _code_bytes(cache) -> int:
    """Bytes of a prepared query row before its tail: INT8 codes, or for `bf16` the elements."""
    return cache.shape.head_dim * (cache.shape.dtype.itemsize if cache.kv.precision == "bf16" else 1)


def prepared_queries(cache, q: torch.Tensor) -> torch.Tensor:
    """Room for `write_kv`'s prepared queries of q: uint8 [N, query_heads, bytes of a row] (layout.cuh)."""
    return torch.empty(*q.shape[:2], _code_bytes(cache) + QUERY_TAIL, dtype=torch.uint8, device=q.device)


def _require_prepared(cache, prepared: torch.Tensor, tokens: int, *, tail: bool = True) -> None:
    """Rows of `prepared_queries`; without `tail`, as `write_kv` leaves it off elements, also rows of these alone."""
    row = _code_bytes(cache)
    require(isinstance(prepared, torch.Tensor), "prepared", type(prepared).__name__, "what `prepared_queries` makes")
    if tail or cache.kv.precision != "bf16" or prepared.shape[-1] != row:
        row += QUERY_TAIL
    _require_dense("prepared", prepared, torch.uint8, (tokens, cache.shape.query_heads, row), cache)


def write_defines(cache, before=None, where=None) -> dict[str, int]:
    """What a build of `write_kv` fixes."""
    return {
        "HEAD_DIM": cache.shape.head_dim,
        "EACH": WRITE_CHANNELS,
        "PRECISION": PRECISION_CODES[cache.kv.precision],
        "INPUT_TYPE": INPUT_TYPES[cache.shape.dtype],
        "BEFORE": 0 if before is None else 1 if before.q_weight is None else 2,
        "PAGE_EACH": where is not None and where.page_each and cache.kv.precision != "bf16",
    }


def write_arguments(cache, layer: int, q, k, v, where, prepared, before=None) -> WriteArguments:
    """Arguments of `write_kv` for q (into `prepared`), for k and v (at `where`), or for all three.

    `before` (model/pointwise.py: NormRotate): what is still to be done to q and k. Raises `ValueError`, naming it, for
    whatever does not fit the cache.
    """
    require_writable(cache, layer, q, k, v, where)
    if q is not None:
        _require_prepared(cache, prepared, len(q), tail=False)
    shape, given = cache.shape, q if q is not None else k
    arguments = WriteArguments(
        tokens=len(given),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        entries=cache.side.entries,
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            setattr(arguments, name, x.data_ptr())
            setattr(arguments, f"{name}_stride", x.stride(0) * x.itemsize)
    if q is not None:
        arguments.query, arguments.query_row = prepared.data_ptr(), prepared.shape[-1]
    if k is not None:
        arguments.pages = cache.main.storage[layer].data_ptr()
        _point_at_rows(arguments, where, "page_ids offsets slots side_entries")
        _point_at_side(arguments, cache, layer)
    if before is not None:
        _point_at_norm_and_rope(arguments, before, len(given), cache)
    return arguments


def require_writable(cache, layer: int, q, k, v, where) -> None:
    """Raise `ValueError`, naming it, for whatever of a `write_kv` does not fit the cache."""
    if (k is None) != (v is None) or (q is None and k is None):
        given = ", ".join(name for name, x in (("q", q), ("k", k), ("v", v)) if x is not None) or None
        require(False, "given", given, "q, or k and v, or all three")
    if q is not None:
        cache.check_layer(layer)
        cache.check_heads("q", q, cache.shape.query_heads)
    if k is not None:
        require(where is not None, "where", where, "the TokenSlots of k and v")
        cache.check_write(layer, k, v, where)
        if q is not None and len(q) != len(k):
            require(False, "q.shape", tuple(q.shape), f"as many tokens as k has, {len(k)}")


def _point_at_norm_and_rope(arguments: WriteArguments, before, tokens: int, cache) -> None:
    shape = cache.shape
    table, weight = (tokens, 1, shape.head_dim), (shape.head_dim,)
    tensors = [("cosines", before.cos, table), ("sines", before.sin, table)]
    if before.q_weight is not None:
        tensors += [("q_weight", before.q_weight, weight), ("k_weight", before.k_weight, weight)]
    for name, tensor, wanted in tensors:
        _require_dense(name, tensor, shape.dtype, wanted, cache)
        setattr(arguments, name, tensor.data_ptr())
    arguments.eps = before.eps


def plan_arguments(cache, batch, units, counters, chunk_weight: int) -> PlanArguments:
    """Arguments of `plan` for a `DecodeBatch`."""
    sink, recent = protected_widths(cache.kv)
    arguments = PlanArguments(
        units=units.data_ptr(),
        counters=counters.data_ptr(),
        rows=len(batch.context_tokens),
        sink=sink,
        recent=recent,
        chunk_weight=chunk_weight,
    )
    _point_at_rows(arguments, batch, "context_tokens slots")
    return arguments


def decode_arguments(cache, layer: int, batch, prepared, out, lse, units, counters, partial, arrivals):
    """Arguments of a decode kernel: `prepared` queries and a planned batch in, `out` and `lse` (or None) out.

    Raises `ValueError`, naming it, for whatever does not fit the cache or the batch.
    """
    shape, table = cache.shape, batch.page_table
    cache.check_layer(layer)
    _require_prepared(cache, prepared, len(table))
    _require_outputs(cache, out, lse, len(table))
    sink, recent = protected_widths(cache.kv)
    arguments = DecodeArguments(
        query=prepared.data_ptr(),
        pages=cache.main.storage[layer].data_ptr(),
        page_table=table.data_ptr(),
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        units=units.data_ptr(),
        counters=counters.data_ptr(),
        partial=partial.data_ptr(),
        arrivals=arrivals.data_ptr(),
        page_table_stride=table.stride(0),
        kv_heads=shape.kv_heads,
        group=shape.group,
        sink=sink,
        recent=recent,
        out_type=INPUT_TYPES[out.dtype],
        score_scale=math.log2(math.e) / math.sqrt(shape.head_dim),
    )
    _point_at_side(arguments, cache, layer)
    return arguments


def _require_outputs(cache, out: torch.Tensor, lse: torch.Tensor | None, rows: int) -> None:
    heads = (rows, cache.shape.query_heads)
    require(isinstance(out, torch.Tensor), "out", type(out).__name__, f"a tensor {(*heads, cache.shape.head_dim)}")
    require(out.dtype in INPUT_TYPES, "out.dtype", out.dtype, "bfloat16, float16 or float32")
    _require_dense("out", out, out.dtype, (*heads, cache.shape.head_dim), cache)
    if lse is not None:
        _require_dense("lse", lse, torch.float32, heads, cache, align=4)
        shared = lse.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        require(not (shared and rows), "lse", "in out's memory", "memory of its own: both are written")


def _point_at_rows(arguments, source, names: str) -> None:
    """Point at dense copies of per-row index tensors, and keep the copies alive as long as the arguments are."""
    arguments.kept = [getattr(source, name).contiguous() for name in names.split()]
    for name, rows in zip(names.split(), arguments.kept, strict=True):
        setattr(arguments, name, rows.data_ptr())


def _point_at_side(arguments, cache, layer: int) -> None:
    side = cache.side
    if side.entries:
        arguments.side_k, arguments.side_v = side.k_codes[layer].data_ptr(), side.v_codes[layer].data_ptr()
        arguments.side_k_scale, arguments.side_v_scale = side.k_scale[layer].data_ptr(), side.v_scale[layer].data_ptr()


class Workspace:
    """What `plan` and decode keep between launches, for at most `max_rows` requests of at most `max_pages` pages."""

    def __init__(self, cache, max_rows: int, max_pages: int, chunk_weight: int | None = None):
        shape, device = cache.shape, cache.device
        chunk_weight = chunk_weight or chunk_weight_of(cache.num_slots, shape.kv_heads)
        chunks = most_chunks(max_pages, protected_widths(cache.kv), chunk_weight)
        partials = max_rows * chunks if chunks > 1 else 0
        self.limits, self.chunk_weight = (max_rows, max_pages), chunk_weight
        self.units = torch.empty(max_rows * chunks * UNIT_BYTES, dtype=torch.uint8, device=device)
        self.counters = torch.zeros(4, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(max_rows * shape.kv_heads, dtype=torch.int32, device=device)
        self.partial = torch.empty(partials * shape.query_heads * (shape.head_dim + SUMS_TAIL), device=device)

    def fits(self, batch) -> bool:
        """Whether a `DecodeBatch` is within the limits."""
        rows, pages = batch.page_table.shape
        return rows <= self.limits[0] and pages <= self.limits[1]
