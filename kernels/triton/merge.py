"""merge: the exact merge (Eq. A1) of one head's parts, in order: output and natural-log normaliser."""

import triton
import triton.language as tl

from kv4rl.kernels.triton.tiles import round_to


@triton.jit
def merge_kernel(partial, out, lse, parts, query_heads, D: tl.constexpr):
    """Grid (rows, query_heads); partial [rows, parts, query_heads, D + 4]. No part with a token: (0, -inf)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    top = float("-inf")
    total = 0.0
    for part in range(0, parts):
        record = partial + ((row * parts + part) * query_heads + head) * (D + 4)
        its_total = tl.load(record + D + 1)
        if its_total != 0:  # an empty part weighs nothing; NaN is not equal to 0 and stays
            its_top = tl.load(record + D)
            risen = tl.maximum(top, its_top)
            kept, added = tl.exp(top - risen), tl.exp(its_top - risen)
            acc = acc * kept + tl.load(record + channel) * added
            total = total * kept + its_total * added
            top = risen
    at = row * query_heads + head
    empty = total == 0
    mean = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(out + at * D + channel, round_to(mean, out.dtype.element_ty))
    tl.store(lse + at, tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total))))
