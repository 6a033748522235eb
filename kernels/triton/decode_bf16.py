"""decode_bf16: attention of one (request, KV head, part) over unquantised pages; arguments as decode_int4.

`query` holds the model's own elements, [rows, kv_heads * group, D]; keys and values are token-major in the chunk.
"""

import triton
import triton.language as tl

from kv4rl.kernels.triton.tiles import HEADS, TILE, chunk_bounds, nothing, places, round_to, soften, store_partial


@triton.jit
def decode_bf16_kernel(
    query, pages, page_table, context_tokens, partial, table_stride, parts, kv_heads, group, score_scale,
    CHUNK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows, kv_heads, parts). `pages` points to elements; PRECISION "tf32" holds 16-bit ones exactly."""
    row = tl.program_id(0).to(tl.int64)
    head, part = tl.program_id(1), tl.program_id(2)
    context = tl.load(context_tokens + row).to(tl.int32)
    heads, channel = tl.arange(0, HEADS), tl.arange(0, D)
    rows = query + ((row * kv_heads + head) * group + heads) * D
    q = tl.load(rows[:, None] + channel[None, :], mask=heads[:, None] < group, other=0.0).to(tl.float32)
    acc, top, total = nothing(D)
    table, token = page_table + row * table_stride, tl.arange(0, TILE) % 16
    start, stop, first = chunk_bounds(part, 0, context, CHUNK)
    if first < stop:
        for tile in range(start, stop, TILE):
            valid, chunk = places(tile, first, stop, token, table, pages, kv_heads, head, 32 * D)
            place = (chunk + token * D)[:, None] + channel[None, :]
            k = tl.load(place, mask=valid[:, None], other=0.0)
            v = tl.load(place + 16 * D, mask=valid[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision=PRECISION) * score_scale
            p, top, factor = soften(tl.where(valid[None, :], scores, float("-inf")), top)
            total = total * factor + tl.sum(p, 1)
            weights = round_to(p, v.dtype).to(tl.float32)
            acc = acc * factor[:, None] + tl.dot(weights, v.to(tl.float32), input_precision=PRECISION)
    store_partial(partial, row, head, part, parts, kv_heads, group, acc, top, total, D)
