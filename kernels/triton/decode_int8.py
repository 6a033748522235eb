"""decode_int8: attention of one (request, KV head, part) over INT8 pages (kv8); arguments as decode_int4."""

import triton
import triton.language as tl

from kv4rl.kernels.triton.tiles import (
    HEADS,
    TILE,
    chunk_bounds,
    chunks,
    load_codes,
    load_k8,
    load_pair,
    load_query,
    load_v8,
    nothing,
    places,
    signed_byte,
    soften,
    store_partial,
    weights,
)


@triton.jit
def decode_int8_kernel(
    query, pages, page_table, context_tokens, partial, table_stride, parts, kv_heads, group, score_scale,
    CHUNK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (rows, kv_heads, parts)."""
    row = tl.program_id(0).to(tl.int64)
    head, part = tl.program_id(1), tl.program_id(2)
    context = tl.load(context_tokens + row).to(tl.int32)
    rows, live, q_scale, _ = load_query(query, row, head, kv_heads, group, D)
    q = load_codes(rows, live, tl.arange(0, D))
    unit = (q_scale * score_scale)[:, None]
    even, top, total = nothing(D // 2)
    odd = even
    table, token = page_table + row * table_stride, tl.arange(0, TILE) % 16
    start, stop, first = chunk_bounds(part, 0, context, CHUNK)
    if first < stop:
        for tile in range(start, stop, TILE):
            valid, chunk = places(tile, first, stop, token, table, pages, kv_heads, head, 32 * D + 64)
            k_scale, v_scale = load_pair(chunk + 32 * D + 4 * token, valid)
            scores = tl.dot(q, tl.trans(load_k8(chunk, token, D))).to(tl.float32) * k_scale[None, :] * unit
            p, top, factor = soften(tl.where(valid[None, :], scores, float("-inf")), top)
            total = total * factor + tl.sum(p, 1)
            operand, most = weights(p, v_scale, False)
            pair = tile // 16 + tl.arange(0, TILE // 2) // 8
            v = load_v8(chunks(pair, stop, table, pages, kv_heads, head, 32 * D + 64), D)
            first_of_two, second = tl.split(tl.reshape(operand, [HEADS, TILE // 2, 2]))
            values = tl.dot(first_of_two, signed_byte(v, 0)) + tl.dot(second, signed_byte(v, 8))
            even = even * factor[:, None] + values * most
            values = tl.dot(first_of_two, signed_byte(v, 16)) + tl.dot(second, signed_byte(v, 24))
            odd = odd * factor[:, None] + values * most
    acc = tl.reshape(tl.join(even, odd), [HEADS, D])
    store_partial(partial, row, head, part, parts, kv_heads, group, acc, top, total, D)
