"""The `triton` backend: kernels/triton on any recent GPU, and on the CPU under TRITON_INTERPRET=1.

The portable twin of `attention/cuda.py`, held to the same reference: slower, with nothing to compile beforehand.
Parts of `CHUNK` tokens lie at absolute positions, so a request's bits do not depend on its batch.
"""

import os
import sys

import torch

from kv4rl.attention.backends import BackendUnavailable
from kv4rl.attention.cuda_arguments import require_writable
from kv4rl.config import PAGE_TOKENS, require

CHUNK = 1024  # tokens of one part
SHAPE = {"num_warps": 4, "num_stages": 3}  # of a decode launch: warps of a program, tiles loaded ahead
QUERY_TAIL = 16  # bytes after the codes of a prepared query row (kernels/cuda/layout.cuh)
INTERPRET = "TRITON_INTERPRET"


def use_interpreter() -> bool:
    """Run the kernels in Triton's interpreter where there is no CUDA device; True if it is now on.

    Triton decides on import, so RuntimeError if something has imported it before this.
    """
    if torch.cuda.is_available():
        return False
    if "triton" in sys.modules and os.environ.get(INTERPRET) != "1":
        raise RuntimeError("Triton was imported without its interpreter: restart Python, call use_interpreter() first")
    os.environ[INTERPRET] = "1"
    return True


def _kernels():
    """The kernel modules; imported late, since Triton decides on import whether to interpret."""
    from kv4rl.kernels.triton import decode_bf16, decode_int4, decode_int8, merge, write_kv

    return write_kv, decode_int4, decode_int8, decode_bf16, merge


def write_kv(cache, layer: int, q, k, v, where) -> torch.Tensor | None:
    """As `attention.cuda.write_kv`, for the quantised precisions."""
    require(cache.kv.precision != "bf16", "precision", "bf16", "kv8, kv4 or kv4rl: `write_plain` stores elements")
    require_writable(cache, layer, q, k, v, where)
    shape, given = cache.shape, q if q is not None else k
    prepared = None
    if q is not None:
        q = q.contiguous()
        prepared = torch.empty(*q.shape[:2], shape.head_dim + QUERY_TAIL, dtype=torch.uint8, device=q.device)
    if k is not None:
        k, v = k.contiguous(), v.contiguous()
    side = cache.side
    unused = cache.main.storage  # stands in for what a launch does not touch
    places = [getattr(where, name, unused) for name in ("page_ids", "offsets", "slots", "side_entries")]
    vectors = (shape.query_heads if q is not None else 0) + (2 * shape.kv_heads if k is not None else 0)
    kernel = _kernels()[0].write_kv_kernel
    kernel[(len(given), vectors)](
        *(x if x is not None else given for x in (q, k, v)),
        shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim,
        prepared if prepared is not None else unused, cache.main.storage[layer],
        *((side.k_codes[layer], side.v_codes[layer], side.k_scale[layer], side.v_scale[layer])
          if side.entries else (unused,) * 4),
        *places, shape.query_heads, shape.kv_heads, side.entries,
        QUERIES=q is not None, KEYS=k is not None, INT8=cache.kv.precision == "kv8", D=shape.head_dim,
        enable_fp_fusion=False,  # codes are the reference's: each operation rounds
    )  # fmt: skip
    return prepared


def write_plain(cache, layer: int, k: torch.Tensor, v: torch.Tensor, where) -> None:
    """`bf16`: the elements as they are, rows of page -1 left out."""
    keep = where.page_ids >= 0
    cache.main.write(layer, k[keep], v[keep], where.page_ids[keep], where.offsets[keep])


def prepare(cache, layer: int, q: torch.Tensor) -> torch.Tensor:
    """Queries as `attend` reads them: prepared rows (kernels/cuda/layout.cuh), or for `bf16` the elements."""
    return q.contiguous() if cache.kv.precision == "bf16" else write_kv(cache, layer, q, None, None, None)


def attend(cache, layer: int, prepared: torch.Tensor, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the model's dtype and natural-log normaliser, by one launch over all parts and one that merges them.

    Nothing is read back: a graph can capture it, once kernels of these arguments' kinds have been compiled.
    """
    _, int4, int8, bf16, merge = _kernels()
    shape, kv = cache.shape, cache.kv
    rows, d, device = len(prepared), shape.head_dim, prepared.device
    protected = kv.protected_tokens > 0
    parts = max(1, -(-batch.page_table.shape[1] * PAGE_TOKENS // CHUNK)) + protected
    partial = torch.empty(rows, parts, shape.query_heads, d + 4, dtype=torch.float32, device=device)
    table, storage = batch.page_table.contiguous(), cache.main.storage[layer]
    heads = (table.stride(0), parts, shape.kv_heads, shape.group)
    grid, scale = (rows, shape.kv_heads, parts), d**-0.5
    if kv.precision == "bf16":
        args = (prepared, storage.view(cache.main.dtype), table, batch.context_tokens, partial, *heads, scale)
        precision = "ieee" if cache.main.dtype == torch.float32 else "tf32"
        bf16.decode_bf16_kernel[grid](*args, CHUNK=CHUNK, D=d, PRECISION=precision, **SHAPE)
    elif kv.precision == "kv8":
        args = (prepared, storage, table, batch.context_tokens, partial, *heads, scale)
        int8.decode_int8_kernel[grid](*args, CHUNK=CHUNK, D=d, **SHAPE)
    else:
        side = cache.side
        buffers = (side.k_codes, side.v_codes, side.k_scale, side.v_scale) if protected else (cache.main.storage,) * 4
        sink, recent = (kv.sink_tokens, kv.recent_tokens) if protected else (0, 0)
        int4.decode_int4_kernel[grid](
            prepared, storage, table, batch.context_tokens, batch.slots, *(x[layer] for x in buffers), partial,
            *heads, sink, recent, scale,
            PROTECTED=protected, CHUNK=CHUNK, U8=kv.probability_operand == "u8", D=d, **SHAPE,
        )  # fmt: skip
    out = torch.empty(rows, shape.query_heads, d, dtype=shape.dtype, device=device)
    lse = torch.empty(rows, shape.query_heads, dtype=torch.float32, device=device)
    merge.merge_kernel[(rows, shape.query_heads)](partial, out, lse, parts, shape.query_heads, D=d)
    return out, lse


class TritonBackend:
    """`attention.backends.Backend` over the kernels of kernels/triton."""

    name = "triton"

    def write(self, cache, layer, k, v, where):
        if cache.kv.precision == "bf16":
            write_plain(cache, layer, k, v, where)
        else:
            write_kv(cache, layer, None, k, v, where)

    def decode(self, cache, layer, q, batch, return_lse=False):
        out, lse = attend(cache, layer, prepare(cache, layer, q), batch)
        return (out, lse) if return_lse else out


def make_backend(device: torch.device) -> TritonBackend:
    """The backend on `device`. Raises `BackendUnavailable` where Triton is missing or would need its interpreter."""
    try:
        import triton  # noqa: F401
    except ImportError as missing:
        raise BackendUnavailable("Triton is not installed: pip install triton, or use backend='reference'") from missing
    if device.type == "cpu" and os.environ.get(INTERPRET) != "1":
        raise BackendUnavailable(f"on a CPU it needs the interpreter: set {INTERPRET}=1 before Python starts")
    return TritonBackend()
