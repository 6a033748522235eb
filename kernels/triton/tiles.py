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
def chunks(page_number, stop, page_table, pages, kv_heads, head, BYTES: tl.constexpr):
    """The chunk of each page number of a request. Masked by whole pages: Triton then sees that tokens share one."""
    page = tl.load(page_table + page_number, mask=page_number * 16 < stop, other=0)
    return pages + (page * kv_heads + head) * BYTES


@triton.jit
def places(tile, first, stop, token, page_table, pages, kv_heads, head, BYTES: tl.constexpr):
    """(valid, chunk) of TILE tokens; `token`: which of its page's 16 each is."""
    page_number = tile // 16 + tl.arange(0, TILE) // 16
    position = page_number * 16 + token
    valid = (position >= first) & (position < stop)
    return valid, chunks(page_number, stop, page_table, pages, kv_heads, head, BYTES)


@triton.jit
def nothing(D: tl.constexpr):
    """(output, maximum, sum) before the first tile."""
    return tl.zeros([HEADS, D], tl.float32), tl.full([HEADS], float("-inf"), tl.float32), tl.zeros([HEADS], tl.float32)


@triton.jit
def storage_order():
    """The token of a page that each of TILE rows is, in the order of INT4 value codes: a word is four rows."""
    row = tl.arange(0, TILE)
    return row % 2 * 8 + row // 4 % 4 * 2 + row // 2 % 2


@triton.jit
def load_k4(chunk, token, D: tl.constexpr):
    """Bytes of key codes, uint8 [TILE, D / 2]: channels `half_channels` in the low nibbles, 8 on in the high ones."""
    x = tl.arange(0, D // 2)[None, :]
    token = token[:, None]
    place = x // 32 * 512 + token % 8 * 64 + x // 8 % 4 * 16 + x // 4 % 2 * 8 + token // 8 * 4 + x % 4
    return tl.load(chunk[:, None] + place)


@triton.jit
def half_channels(D: tl.constexpr):
    """Channels of the low nibbles of `load_k4`."""
    x = tl.arange(0, D // 2)
    return x // 32 * 64 + x // 8 % 4 * 16 + x // 4 % 2 * 4 + x % 4


@triton.jit
def load_v4(chunk, D: tl.constexpr):
    """Bytes of value codes, uint8 [TILE in storage_order, D / 2]: channels 2x in low nibbles, 2x + 1 in high ones."""
    x = tl.arange(0, D // 2)[None, :]
    row = tl.arange(0, TILE)[:, None]
    place = 8 * D + x % (D // 16) // 4 * 512 + x // (D // 16) * 64 + x % 4 * 4 + row // 4 % 4 * 16 + row % 4
    return tl.load(chunk[:, None] + place)


@triton.jit
def subnormal(codes):
    """Codes 0..240 as float16 code * 2^-24: their bits are the number."""
    return codes.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def load_k8(chunk, token, D: tl.constexpr):
    """Key codes, int8 [TILE, D]."""
    c = tl.arange(0, D)[None, :]
    token = token[:, None]
    block = c // 64 * 2 + c // 8 % 2
    place = block * 512 + token % 8 * 64 + c // 16 % 4 * 16 + c // 4 % 2 * 8 + token // 8 * 4 + c % 4
    return tl.load(chunk[:, None] + place).to(tl.int8, bitcast=True)


@triton.jit
def load_v8(chunk, D: tl.constexpr):
    """Words of value codes, int32 [TILE / 2, D / 2]: of two tokens (bytes 0, 1) in channel 2x, then in 2x + 1."""
    x = tl.arange(0, D // 2)[None, :]
    row = tl.arange(0, TILE // 2)[:, None]
    place = 4 * D + x % (D // 16) // 2 * 128 + x // (D // 16) * 16 + x % 2 * 2 + row % 4 * 4 + row // 4 % 2
    return tl.load(chunk[:, None].to(tl.pointer_type(tl.int32)) + place)


@triton.jit
def signed_byte(words, SHIFT: tl.constexpr):
    """A byte of each word, -128..127, as float16: its bits with the sign turned are the last of 1024 + 128 + code."""
    bits = ((words >> SHIFT) & 255) ^ 0x6480
    return bits.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def load_pair(numbers, valid):
    """Two neighbouring FP16 numbers of each token as FP32, in one word: Triton does not load fewer bytes ahead."""
    words = tl.load(numbers.to(tl.pointer_type(tl.int32)), mask=valid, other=0)
    low, high = (words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16)
    return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_query(query, row, head, kv_heads, group, D: tl.constexpr):
    """Of one KV head's prepared queries: (pointers to their rows, live rows, scale, code sum FP32 [HEADS])."""
    heads = tl.arange(0, HEADS)
    live = heads < group
    rows = query + ((row * kv_heads + head) * group + heads) * (D + 16)
    tail = (rows + D).to(tl.pointer_type(tl.float32))
    return rows, live, tl.load(tail, mask=live, other=0.0), tl.load(tail + 1, mask=live, other=0.0)


@triton.jit
def load_codes(rows, live, channel):
    """INT8 codes of the queries in `rows` at `channel`, [HEADS, channels]; 0 in rows past the group."""
    codes = tl.load(rows[:, None] + channel[None, :], mask=live[:, None], other=0)
    return codes.to(tl.int8, bitcast=True)


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
def weights(p, v_scale, U8: tl.constexpr):
    """p * v_scale as (operand FP16 [HEADS, TILE], unit [HEADS, 1]): FP16 or 8-bit, relative to the tile's largest."""
    weights = p * v_scale[None, :]
    most = tl.max(weights, 1)
    relative = weights * tl.where(most < 1e-37, 0.0, 1.0 / most)[:, None]  # less weighs nothing beside p = 1
    if U8:
        steps = ((relative * 255.0 + 12582912.0) - 12582912.0).to(tl.float16)  # integers to 255: exact
        return steps, (most / 255.0)[:, None]
    return relative.to(tl.float16), most[:, None]


@triton.jit
def store_partial(partial, row, head, part, parts, kv_heads, group, acc, top, total, D: tl.constexpr):
    """Un-normalised sums, the maximum they refer to and the sum of p; merge.py finishes them."""
    heads = tl.arange(0, HEADS)
    record = partial + (((row * parts + part) * kv_heads + head) * group + heads) * (D + 4)
    live = heads < group
    tl.store(record[:, None] + tl.arange(0, D)[None, :], acc, mask=live[:, None])
    tl.store(record + D, top, mask=live)
    tl.store(record + D + 1, total, mask=live)
