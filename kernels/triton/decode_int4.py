"""decode_int4: attention of one (request, KV head, part) over INT4 pages, or over the INT8 side buffer.

With PROTECTED, part 0 is the side buffer and main parts follow; argument order as kernels/cuda/decode.cuh.
"""

import triton
import triton.language as tl

from kv4rl.kernels.triton.tiles import (
    HEADS,
    TILE,
    chunk_bounds,
    load_k4,
    load_query,
    load_v4,
    nearest_bf16,
    soften,
    store_partial,
    weighted,
)


@triton.jit
def attend_main(
    query, pages, table, part, row, head, kv_heads, group, begin, end, score_scale,
    CHUNK: tl.constexpr, U8: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    q, q_scale, q_sum = load_query(query, row, head, kv_heads, group, D)
    unit = (q_scale * score_scale)[:, None]
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
    start, stop, first = chunk_bounds(part, begin, end, CHUNK)
    if first < stop:
        for tile in range(start, stop, TILE):
            position = tile + tl.arange(0, TILE)
            valid = (position >= first) & (position < stop)
            page = tl.load(table + position // 16, mask=valid, other=0)
            chunk = pages + (page * kv_heads + head) * (16 * D + 128)
            token = position % 16
            numbers = (chunk + 16 * D).to(tl.pointer_type(tl.float16)) + 4 * token
            k_scale = tl.load(numbers, mask=valid, other=0.0).to(tl.float32)
            k_offset = tl.load(numbers + 1, mask=valid, other=0.0).to(tl.float32)
            v_scale = tl.load(numbers + 2, mask=valid, other=0.0).to(tl.float32)
            v_offset = tl.load(numbers + 3, mask=valid, other=0.0).to(tl.float32)
            dots = tl.dot(q, tl.trans(load_k4(chunk, token, D))).to(tl.float32)
            scores = (dots * k_scale[None, :] + q_sum[:, None] * k_offset[None, :]) * unit
            p, top, factor = soften(tl.where(valid[None, :], scores, float("-inf")), top)
            total = total * factor + tl.sum(p, 1)
            acc = acc * factor[:, None] + weighted(p, v_scale, load_v4(chunk, token, D), U8)
            acc += tl.sum(p * v_offset[None, :], 1)[:, None]
    return acc, top, total


@triton.jit
def attend_side(
    query, side_k, side_v, side_k_scale, side_v_scale, row, slot, head, kv_heads, group, valid_entries, entries,
    score_scale, D: tl.constexpr,
):  # fmt: skip
    """The protected positions: integer QK, then P and V in BF16 (paper 5.3, A.3)."""
    q, q_scale, _ = load_query(query, row, head, kv_heads, group, D)
    unit = (q_scale * score_scale)[:, None]
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, D], tl.float32)
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
