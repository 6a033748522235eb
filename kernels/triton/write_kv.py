"""write_kv: rotate, quantise and pack the step's q, k, v, one program per (token, head) vector.

The same formulas and order of operations as kv4rl/formats; argument order as kernels/cuda/write_kv.cu.
"""

import triton
import triton.language as tl

FP16_MAX = tl.constexpr(65504.0)
EXTREME = tl.constexpr(1e38)


@triton.jit
def butterfly(y, STRIDE: tl.constexpr, D: tl.constexpr):
    """(a + b, a - b) of elements STRIDE apart."""
    pairs = tl.permute(tl.reshape(y, [D // (2 * STRIDE), 2, STRIDE]), [0, 2, 1])
    upper, lower = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(upper + lower, upper - lower), [0, 2, 1]), [D])


@triton.jit
def rotate(x, D: tl.constexpr):
    """x H / sqrt(D) by butterflies, largest stride first (formats/hadamard.py)."""
    y = x
    for stage in tl.static_range(1, 9):  # head_dim up to 256
        if D >> stage > 0:
            y = butterfly(y, D >> stage, D)
    norm: tl.constexpr = D**-0.5
    return y * norm


@triton.jit
def round_half_even(x):
    """Nearest integer as float, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def saturate(x):
    """FP32 to FP16: overflow becomes the largest finite value, NaN stays NaN."""
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)).to(tl.float16)


@triton.jit
def codes_of(x, step, low: tl.constexpr, high: tl.constexpr):
    """x / step rounded into [low, high], int32; 0 for a zero step or NaN."""
    positive = step > 0
    quotient = tl.where(positive, tl.div_rn(x, tl.where(positive, step, 1.0)), 0.0)
    quotient = tl.where(quotient != quotient, 0.0, tl.minimum(tl.maximum(quotient, low - 1.0), high + 1.0))
    return tl.minimum(tl.maximum(round_half_even(quotient), low), high).to(tl.int32)


@triton.jit
def symmetric(x):
    """(codes int32, FP32 value of amax / 127 before any rounding); NaN in x makes the scale NaN."""
    amax = tl.max(tl.abs(x), 0)
    nan = tl.max((x != x).to(tl.int32), 0) > 0
    return tl.where(nan, float("nan"), tl.div_rn(amax, 127.0))


@triton.jit
def affine(x):
    """(scale, offset), FP16, of one INT4 group."""
    nan = tl.max((x != x).to(tl.int32), 0) > 0
    low = tl.minimum(tl.maximum(tl.min(x, 0), -EXTREME), EXTREME)
    high = tl.minimum(tl.maximum(tl.max(x, 0), -EXTREME), EXTREME)
    missing = float("nan")
    scale = saturate(tl.where(nan, missing, tl.div_rn(high - low, 15.0)))
    return scale, saturate(tl.where(nan, missing, low))


@triton.jit
def scatter_k4(chunk, codes, token, D: tl.constexpr):
    """One token's INT4 key codes into fragment order (packing.py): a byte holds channels c and c + 8."""
    low, high = tl.split(tl.permute(tl.reshape(codes, [D // 16, 2, 8]), [0, 2, 1]))
    block = tl.arange(0, D // 16)[:, None]  # (s, t)
    inner = tl.arange(0, 8)[None, :]  # (i1, b)
    place = block // 4 * 512 + (token % 8) * 64 + block % 4 * 16 + inner // 4 * 8 + token // 8 * 4 + inner % 4
    tl.store(chunk + place, (low | (high << 4)).to(tl.uint8))


@triton.jit
def scatter_v4(chunk, codes, token, D: tl.constexpr):
    """One token's INT4 value codes: a byte holds channels 2x and 2x + 1."""
    even, odd = tl.split(tl.reshape(codes, [D // 2, 2]))
    x = tl.arange(0, D // 2)
    g, j = x // (D // 16), x % (D // 16)
    place = j // 4 * 512 + (4 * g + token // 2 % 4) * 16 + j % 4 * 4 + token % 2 * 2 + token // 8
    tl.store(chunk + 8 * D + place, (even | (odd << 4)).to(tl.uint8))


@triton.jit
def scatter_k8(chunk, codes, token, D: tl.constexpr):
    c = tl.arange(0, D)
    s, t, x, i1, b = c // 64, c // 16 % 4, c // 8 % 2, c // 4 % 2, c % 4
    place = (2 * s + x) * 512 + (token % 8) * 64 + t * 16 + i1 * 8 + token // 8 * 4 + b
    tl.store(chunk + place, (codes & 255).to(tl.uint8))


@triton.jit
def scatter_v8(chunk, codes, token, D: tl.constexpr):
    c = tl.arange(0, D)
    g, r = c // (D // 8), c % (D // 8)
    place = r // 4 * 512 + (4 * g + token // 2 % 4) * 16 + r // 2 % 2 * 8 + token // 8 * 4 + r % 2 * 2 + token % 2
    tl.store(chunk + 16 * D + place, (codes & 255).to(tl.uint8))


@triton.jit
def write_query(q, query, q_stride, token, head, query_heads, D: tl.constexpr):
    """The prepared row: D INT8 codes, FP32 scale, FP32 sum of codes, 8 spare bytes."""
    x = tl.load(q + token * q_stride + head * D + tl.arange(0, D)).to(tl.float32)
    y = rotate(x, D)
    scale = symmetric(y)
    codes = codes_of(y, scale, -127, 127)
    row = query + (token * query_heads + head) * (D + 16)
    tl.store(row + tl.arange(0, D), (codes & 255).to(tl.uint8))
    tail = (row + D).to(tl.pointer_type(tl.float32))
    tl.store(tail, scale)
    tl.store(tail + 1, tl.sum(codes, 0).to(tl.float32))


@triton.jit
def write_page(y, pages, page, token, head, kv_heads, is_v: tl.constexpr, INT8: tl.constexpr, D: tl.constexpr):
    """One rotated key or one value into its page's chunk."""
    if INT8:
        chunk = pages + (page * kv_heads + head) * (32 * D + 64)
        scale = saturate(symmetric(y))
        codes = codes_of(y, scale.to(tl.float32), -127, 127)
        tl.store((chunk + 32 * D).to(tl.pointer_type(tl.float16)) + 2 * token + is_v, scale)
        if is_v:
            scatter_v8(chunk, codes, token, D)
        else:
            scatter_k8(chunk, codes, token, D)
    else:
        chunk = pages + (page * kv_heads + head) * (16 * D + 128)
        scale, offset = affine(y)
        codes = codes_of(y - offset.to(tl.float32), scale.to(tl.float32), 0, 15)
        numbers = (chunk + 16 * D).to(tl.pointer_type(tl.float16)) + 4 * token + 2 * is_v
        tl.store(numbers, scale)
        tl.store(numbers + 1, offset)
        if is_v:
            scatter_v4(chunk, codes, token, D)
        else:
            scatter_k4(chunk, codes, token, D)


@triton.jit
def write_vector(
    source, stride, pages, side, side_scale, page_ids, offsets, slots, side_entries, token, head, kv_heads,
    entries, is_v: tl.constexpr, INT8: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Keys (rotated) or values of one (token, head), to the page and, where it is kept, to the side buffer."""
    page = tl.load(page_ids + token)
    if page >= 0:
        y = tl.load(source + token * stride + head * D + tl.arange(0, D)).to(tl.float32)
        if not is_v:
            y = rotate(y, D)
        write_page(y, pages, page, tl.load(offsets + token), head, kv_heads, is_v, INT8, D)
        if entries > 0:
            entry = tl.load(side_entries + token)
            if entry >= 0:
                at = (tl.load(slots + token) * kv_heads + head) * entries + entry
                scale = saturate(symmetric(y))
                tl.store(side + at * D + tl.arange(0, D), codes_of(y, scale.to(tl.float32), -127, 127).to(tl.int8))
                tl.store(side_scale + at, scale)


@triton.jit
def write_kv_kernel(
    q, k, v, q_stride, k_stride, v_stride, query, pages, side_k, side_v, side_k_scale, side_v_scale,
    page_ids, offsets, slots, side_entries, query_heads, kv_heads, entries,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, INT8: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, vectors of a token): query heads first if QUERIES, then keys and values if KEYS."""
    token = tl.program_id(0).to(tl.int64)
    vector = tl.program_id(1)
    if QUERIES:
        if vector < query_heads:
            write_query(q, query, q_stride, token, vector, query_heads, D)
        vector -= query_heads
    if KEYS:
        if (vector >= 0) & (vector < kv_heads):
            write_vector(
                k, k_stride, pages, side_k, side_k_scale, page_ids, offsets, slots, side_entries, token, vector,
                kv_heads, entries, False, INT8, D,
            )  # fmt: skip
        if vector >= kv_heads:
            write_vector(
                v, v_stride, pages, side_v, side_v_scale, page_ids, offsets, slots, side_entries, token,
                vector - kv_heads, kv_heads, entries, True, INT8, D,
            )  # fmt: skip
