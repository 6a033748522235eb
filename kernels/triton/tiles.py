"""What the decode kernels share: codes of 64 tokens out of their chunks, and one step of the running softmax.

`chunk` is a pointer per token to its (page, KV head) chunk; `token` its place in the page, 0 .. 15 (packing.py).
"""

import triton
import triton.language as tl

TILE = tl.constexpr(64)  # tokens a step, at absolute positions: rounding of P depends on nothing else
HEADS = tl.constexpr(16)  # query heads of a KV head, padded to the smallest dot


@triton.jit
def nearest_bf16(x):
    """FP32 rounded to BF16's grid, half to even; the conversion itself then loses nothing (the interpreter's cuts)."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """FP32 to the model's dtype."""
    if dtype == tl.bfloat16:
        x = nearest_bf16(x)
    return x.to(dtype)


@triton.jit
def load_k4(chunk, token, D: tl.constexpr):
    """Key codes 0..15, int8 [TILE, D]."""
    c = tl.arange(0, D)[None, :]
    token = token[:, None]
    place = c // 64 * 512 + token % 8 * 64 + c // 16 % 4 * 16 + c // 4 % 2 * 8 + token // 8 * 4 + c % 4
    return ((tl.load(chunk[:, None] + place) >> (c // 8 % 2 * 4).to(tl.uint8)) & 15).to(tl.int8)


@triton.jit
def load_v4(chunk, token, D: tl.constexpr):
    """Value codes 0..15, float16 [TILE, D]."""
    c = tl.arange(0, D)[None, :]
    token = token[:, None]
    g, j = c // (D // 8), c % (D // 8) // 2
    place = 8 * D + j // 4 * 512 + (4 * g + token // 2 % 4) * 16 + j % 4 * 4 + token % 2 * 2 + token // 8
    return ((tl.load(chunk[:, None] + place) >> (c % 2 * 4).to(tl.uint8)) & 15).to(tl.float16)


@triton.jit
def load_k8(chunk, token, D: tl.constexpr):
    """Key codes, int8 [TILE, D]."""
    c = tl.arange(0, D)[None, :]
    token = token[:, None]
    block = c // 64 * 2 + c // 8 % 2
    place = block * 512 + token % 8 * 64 + c // 16 % 4 * 16 + c // 4 % 2 * 8 + token // 8 * 4 + c % 4
    return tl.load(chunk[:, None] + place).to(tl.int8, bitcast=True)


@triton.jit
def load_v8(chunk, token, D: tl.constexpr):
    """Value codes, float16 [TILE, D]."""
    c = tl.arange(0, D)[None, :]
    token = token[:, None]
    g, r = c // (D // 8), c % (D // 8)
    lane = 4 * g + token // 2 % 4
    place = 16 * D + r // 4 * 512 + lane * 16 + r // 2 % 2 * 8 + token // 8 * 4 + r % 2 * 2 + token % 2
    return tl.load(chunk[:, None] + place).to(tl.int8, bitcast=True).to(tl.float16)


@triton.jit
def load_query(query, row, head, kv_heads, group, D: tl.constexpr):
    """Prepared queries of one KV head: (codes int8 [HEADS, D], scale, code sum FP32 [HEADS]); rows past group are 0."""
    heads = tl.arange(0, HEADS)
    live = heads < group
    rows = query + ((row * kv_heads + head) * group + heads) * (D + 16)
    codes = tl.load(rows[:, None] + tl.arange(0, D)[None, :], mask=live[:, None], other=0)
    tail = (rows + D).to(tl.pointer_type(tl.float32))
    scale, total = tl.load(tail, mask=live, other=0.0), tl.load(tail + 1, mask=live, other=0.0)
    return codes.to(tl.int8, bitcast=True), scale, total


@triton.jit
def chunk_bounds(part, begin, end, CHUNK: tl.constexpr):
    """[start, stop) of part's tokens, start rounded down to a whole tile; empty if start >= stop."""
    first = tl.maximum(begin, part * CHUNK)
    return first // TILE * TILE, tl.minimum(end, (part + 1) * CHUNK), first


@triton.jit
def soften(scores, top):
    """(p, new top, factor for what was summed so far) of one tile's scores, natural log."""
    risen = tl.maximum(top, tl.max(scores, 1))
    return tl.exp(scores - risen[:, None]), risen, tl.exp(top - risen)


@triton.jit
def weighted(p, v_scale, v, U8: tl.constexpr):
    """sum p * v_scale * v, [HEADS, D]: P's operand is FP16, or 8-bit, relative to its largest in the tile."""
    weights = p * v_scale[None, :]
    most = tl.max(weights, 1)
    relative = weights / tl.where(most == 0, 1.0, most)[:, None]
    if U8:
        steps = ((relative * 255.0 + 12582912.0) - 12582912.0).to(tl.float16)  # integers to 255: exact
        return tl.dot(steps, v) * (most / 255.0)[:, None]
    return tl.dot(relative.to(tl.float16), v) * most[:, None]


@triton.jit
def store_partial(partial, row, head, part, parts, kv_heads, group, acc, top, total, D: tl.constexpr):
    """Un-normalised sums, the maximum they refer to and the sum of p; merge.py finishes them."""
    heads = tl.arange(0, HEADS)
    record = partial + (((row * parts + part) * kv_heads + head) * group + heads) * (D + 4)
    live = heads < group
    tl.store(record[:, None] + tl.arange(0, D)[None, :], acc, mask=live[:, None])
    tl.store(record + D, top, mask=live)
    tl.store(record + D + 1, total, mask=live)
