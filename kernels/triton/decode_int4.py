"""decode_int4: attention of one (request, KV head, part) over INT4 pages, or over the INT8 side buffer.

With PROTECTED, part 0 is the side buffer and main parts follow. What kernels/cuda/decode.cuh is given too comes in its
order; a program finds its own part of the context, so contexts and slots stand in place of a plan's units.
"""

import triton
import triton.language as tl

from kv4rl.kernels.triton.tiles import (
    HEADS,
    TILE,
    chunk_bounds,
    half_channels,
    load_codes,
    load_k4,
    load_pair,
    load_query,
    load_v4,
    nearest_bf16,
    nothing,
    places,
    soften,
    storage_order,
    store_partial,
    subnormal,
    weights,
)


@triton.jit
def attend_main(
    query, pages, table, part, row, head, kv_heads, group, begin, end, score_scale,
    CHUNK: tl.constexpr, U8: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Bytes hold two channels: each nibble has its dot, with its half of the query's channels or of the output's."""
    rows, live, q_scale, q_sum = load_query(query, row, head, kv_heads, group, D)
    q_low, q_high = load_codes(rows, live, half_channels(D)), load_codes(rows, live, half_channels(D) + 8)
    unit = (q_scale * score_scale)[:, None]
    even, top, total = nothing(D // 2)
    odd, offset = even, total
    token = storage_order()
    start, stop, first = chunk_bounds(part, begin, end, CHUNK)
    if first < stop:
        for tile in range(start, stop, TILE):
            valid, chunk = places(tile, first, stop, token, table, pages, kv_heads, head, 16 * D + 128)
            numbers = chunk + 16 * D + 8 * token
            k_scale, k_offset = load_pair(numbers, valid)
            v_scale, v_offset = load_pair(numbers + 4, valid)
            k, v = load_k4(chunk, token, D), load_v4(chunk, D)
            dots = tl.dot(q_low, tl.trans((k & 15).to(tl.int8))) + tl.dot(q_high, tl.trans((k >> 4).to(tl.int8)))
            scores = (dots.to(tl.float32) * k_scale[None, :] + q_sum[:, None] * k_offset[None, :]) * unit
            p, top, factor = soften(tl.where(valid[None, :], scores, float("-inf")), top)
            total = total * factor + tl.sum(p, 1)
            offset = offset * factor + tl.sum(p * v_offset[None, :], 1)
            operand, most = weights(p, v_scale, U8)
            even = even * factor[:, None] + tl.dot(operand, subnormal(v & 15)) * (most * 16777216.0)
            odd = odd * factor[:, None] + tl.dot(operand, subnormal(v & 240)) * (most * 1048576.0)
    return tl.reshape(tl.join(even, odd), [HEADS, D]) + offset[:, None], top, total


@triton.jit
def attend_side(
    query, side_k, side_v, side_k_scale, side_v_scale, row, slot, head, kv_heads, group, valid_entries, entries,
    score_scale, D: tl.constexpr,
):  # fmt: skip
    """The protected positions: integer QK, then P and V in BF16 (paper 5.3, A.3)."""
    rows, live, q_scale, _ = load_query(query, row, head, kv_heads, group, D)
    q = load_codes(rows, live, tl.arange(0, D))
    unit = (q_scale * score_scale)[:, None]
    acc, top, total = nothing(D)
    base = (slot * kv_heads + head) * entries
    channel = tl.arange(0, D)[None, :]
    for first in range(0, valid_entries, TILE):
        entry = first + tl.arange(0, TILE)
        valid = entry < valid_entries
        place = (base + entry)[:, None] * D + channel
        k = tl.load(side_k + place, mask=valid[:, None], other=0)
        v = tl.load(side_v + place, mask=valid[:, None], other=0).to(tl.float32)
        k_scale = tl.load(side_k_scale + base + entry, mask=valid, other=0.0).to(tl.float32)
        v_scale = tl.load(side_v_scale + base + entry, mask=valid, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k)).to(tl.float32) * k_scale[None, :] * unit
        p, top, factor = soften(tl.where(valid[None, :], scores, float("-inf")), top)
        total = total * factor + tl.sum(p, 1)
        # Rounded to BF16, multiplied as TF32, which holds BF16 exactly (and the interpreter has no BF16 dot).
        values = nearest_bf16(v * v_scale[:, None])
        acc = acc * factor[:, None] + tl.dot(nearest_bf16(p), values, input_precision="tf32")
    return acc, top, total


@triton.jit
def decode_int4_kernel(
    query, pages, page_table, context_tokens, slots, side_k, side_v, side_k_scale, side_v_scale, partial,
    table_stride, parts, kv_heads, group, sink, recent, score_scale,
    PROTECTED: tl.constexpr, CHUNK: tl.constexpr, U8: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (rows, kv_heads, parts)."""
    row = tl.program_id(0).to(tl.int64)
    head, part = tl.program_id(1), tl.program_id(2)
    context = tl.load(context_tokens + row).to(tl.int32)
    begin = tl.minimum(context, sink)
    end = tl.maximum(begin, context - recent)
    table = page_table + row * table_stride
    if PROTECTED:
        if part == 0:
            slot = tl.load(slots + row)
            acc, top, total = attend_side(
                query, side_k, side_v, side_k_scale, side_v_scale, row, slot, head, kv_heads, group,
                tl.minimum(context, sink + recent), sink + recent, score_scale, D,
            )  # fmt: skip
        else:
            acc, top, total = attend_main(
                query, pages, table, part - 1, row, head, kv_heads, group, begin, end, score_scale, CHUNK, U8, D
            )
    else:
        acc, top, total = attend_main(
            query, pages, table, part, row, head, kv_heads, group, begin, end, score_scale, CHUNK, U8, D
        )
    store_partial(partial, row, head, part, parts, kv_heads, group, acc, top, total, D)
