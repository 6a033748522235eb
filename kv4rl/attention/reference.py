"""Decode attention over the quantised cache in plain torch: the specification the kernels are held to (§5.3, §A.3).

Integers are carried in FP32: every integer sum here stays below 2^24, so FP32 matmuls give it exactly.
Log-normalisers are natural logarithms.
"""

import sys
from typing import NamedTuple

import torch

from kv4rl.attention.live_pages import LivePages, live_pages, segment_max, segment_sum
from kv4rl.attention.merge import merge_state
from kv4rl.attention.regions import main_region
from kv4rl.formats.division import divided
from kv4rl.formats.hadamard import rotate
from kv4rl.formats.packing import unpack_k4, unpack_k8, unpack_v4, unpack_v8
from kv4rl.formats.symmetric import LEVELS, symmetric_codes

BLOCK_ELEMENTS = 2**20  # key elements worked on at once on a CPU: 4 MB in FP32, which stays near the core


class QueryCodes(NamedTuple):
    """The rotated query in INT8, prepared once and used by both paths (§5.3); q_hat = scale * codes."""

    codes: torch.Tensor  # float32 [B, kv_heads, group, d], integers -127 … 127
    scale: torch.Tensor  # float32 [B, kv_heads, group], amax / 127
    total: torch.Tensor  # float32 [B, kv_heads, group], sum of the codes, for the affine offset (Eq. 5.1)


def norm_and_turn(x: torch.Tensor, weight: torch.Tensor | None, before) -> torch.Tensor:
    """QK-norm (if `weight`) and RoPE of x [N, heads, d] in FP32, rounded to x's dtype once, at the end.

    What `model.pointwise.norm_rotate` becomes when it is compiled; eager torch rounds between the two. `before` is its
    NormRotate. Each FP32 operation is rounded by itself, but for the last multiply and add.
    """
    y = x.float()
    if weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + before.eps) * weight.float()
    turned = y.roll(x.shape[-1] // 2, -1).double() * before.sin.double()  # exact
    return (turned + (y * before.cos.float()).double()).float().to(x.dtype)


class Softmax(NamedTuple):
    """An unfinished softmax per query: p = exp(score - top), total = sum of p; (top, total) = (-inf, 0) if empty."""

    p: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    def finish(self, numerator: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log-normaliser) from the sum of p·v, [..., d]; an empty region gives (0, -inf)."""
        total = self.total.unsqueeze(-1)
        return torch.where(total == 0, 0.0, numerator / total), self.top + self.total.log()


def prepare_query(q: torch.Tensor, kv_heads: int) -> QueryCodes:
    """Rotate q [B, query_heads, d] in FP32 and quantise each head's vector to INT8 with an FP32 scale (§A.3)."""
    rotated = rotate(q).unflatten(1, (kv_heads, -1))
    scale = divided(rotated.abs().amax(-1), LEVELS)
    codes = symmetric_codes(rotated, scale)
    return QueryCodes(codes, scale, codes.sum(-1))


def decode_attention(cache, layer: int, q: torch.Tensor, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per request over its cached context (§5.3).

    cache: `KVCache`; q: [B, query_heads, d]; batch: `DecodeBatch`. Returns the output, FP32 [B, query_heads, d], and
    the log-normaliser (natural), FP32 [B, query_heads]; a context of 0 gives (0, -inf).
    """
    blocks = [
        attend_block(cache, layer, q[rows], batch.page_table[rows], batch.context_tokens[rows], batch.slots[rows])
        for rows in request_blocks(cache, batch.context_tokens)
    ]
    o, z = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return o.flatten(1, 2), z.flatten(1, 2)


def block_tokens(cache) -> int:
    """Tokens to work on at once: on a CPU as many as keep FP32 copies of their keys in its cache, elsewhere all."""
    if cache.device.type != "cpu":
        return sys.maxsize
    return max(1, BLOCK_ELEMENTS // (cache.shape.kv_heads * cache.shape.head_dim))


def request_blocks(cache, context_tokens: torch.Tensor) -> list[slice]:
    """Consecutive requests of `block_tokens` together; requests do not touch one another's results."""
    if cache.device.type != "cpu":
        return [slice(None)]
    blocks, start, held = [], 0, 0
    for row, tokens in enumerate(context_tokens.tolist()):
        if held and held + tokens > block_tokens(cache):
            blocks.append(slice(start, row))
            start, held = row, 0
        held += tokens
    return [*blocks, slice(start, len(context_tokens))]


def attend_block(cache, layer, q, page_table, context_tokens, slots) -> tuple[torch.Tensor, torch.Tensor]:
    """`decode_attention` of some requests: o [B, kv_heads, group, d] and z [B, kv_heads, group]."""
    kv = cache.kv
    s, w = (kv.sink_tokens, kv.recent_tokens) if kv.protected_tokens else (0, 0)
    pages = live_pages(page_table, *main_region(context_tokens, s, w))
    if kv.precision == "bf16":
        return attend_unquantised(cache, layer, q, pages)
    query = prepare_query(q, cache.shape.kv_heads)
    main = attend_main(cache, layer, query, pages)
    if kv.protected_tokens == 0:
        return main
    return merge_state(*main, *attend_protected(cache, layer, query, context_tokens, slots))


def attend_unquantised(cache, layer: int, q: torch.Tensor, pages: LivePages) -> tuple[torch.Tensor, torch.Tensor]:
    """`bf16`: stored keys and values as they are, FP32 arithmetic. Returns o [B, kv_heads, group, d] and z."""
    view = cache.main.pages(layer, pages.page_ids)
    q = q.float().unflatten(1, (cache.shape.kv_heads, -1)) * q.shape[-1] ** -0.5
    softmax = page_softmax(block_scores(q[pages.rows], view.k.float()), pages)
    v = view.v.float().masked_fill_(~pages.valid[:, None, :, None], 0.0)  # 0 x NaN of an unwritten tail is NaN
    return softmax.finish(segment_sum(softmax.p @ v, pages.rows, pages.num_requests))


def attend_main(cache, layer: int, query: QueryCodes, pages: LivePages) -> tuple[torch.Tensor, torch.Tensor]:
    """The main path over INT4 (`kv4`, `kv4rl`) or INT8 (`kv8`) pages: integer QK, integer V codes (§A.3).

    score = scale_q (scale_k (q·c) + offset_k sum(q)) / sqrt(d) by Eq. 5.1, and likewise
    sum p v = sum (p scale_v) c + sum p offset_v, whose last term is one scalar per query.
    Returns o [B, kv_heads, group, d] and z [B, kv_heads, group].
    """
    is_int8 = cache.kv.precision == "kv8"
    view = cache.main.pages(layer, pages.page_ids)
    k_codes = (unpack_k8 if is_int8 else unpack_k4)(view.k_codes).float()
    scores = block_scores(query.codes[pages.rows], k_codes) * view.k_scale.float().unsqueeze(-2)
    if view.k_offset is not None:
        scores += query.total[pages.rows].unsqueeze(-1) * view.k_offset.float().unsqueeze(-2)
    scores *= (query.scale * query.codes.shape[-1] ** -0.5)[pages.rows].unsqueeze(-1)
    softmax = page_softmax(scores, pages)

    v_codes = (unpack_v8 if is_int8 else unpack_v4)(view.v_codes).float()
    operand = "fp16" if is_int8 else cache.kv.probability_operand
    weights = rounded_weights(softmax.p * metadata(view.v_scale, pages), pages, operand)
    partial = weights @ v_codes
    if view.v_offset is not None:
        partial += (softmax.p * metadata(view.v_offset, pages)).sum(-1, keepdim=True)
    return softmax.finish(segment_sum(partial, pages.rows, pages.num_requests))


def attend_protected(cache, layer: int, query: QueryCodes, context_tokens, slots) -> tuple[torch.Tensor, torch.Tensor]:
    """The protected path over the side buffer: integer QK, then V and P in BF16 with FP32 accumulation (§5.3, §A.3).

    Entries fill in order (`regions.side_entry`), so the first n of them are the valid ones.
    Returns o [B, kv_heads, group, d] and z [B, kv_heads, group].
    """
    valid = torch.arange(cache.side.entries, device=slots.device) < context_tokens[:, None]
    # A padding row may hold any negative slot: it has no valid entry.
    side_k, side_v = cache.side.gather(layer, slots.clamp(min=0))
    scores = block_scores(query.codes, side_k.codes.float())
    scores *= side_k.scale.float().unsqueeze(-2) * (query.scale * query.codes.shape[-1] ** -0.5).unsqueeze(-1)
    scores = scores.masked_fill_(~valid[:, None, None], -torch.inf)
    top = scores.amax(-1)
    p = torch.where(valid[:, None, None], torch.exp(scores - top.unsqueeze(-1)), 0.0)

    v_scale = side_v.scale.float().masked_fill(~valid[:, None], 0.0)
    v = (side_v.codes.float() * v_scale.unsqueeze(-1)).bfloat16().float()
    return Softmax(p, top, p.sum(-1)).finish(p.bfloat16().float() @ v)


def block_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [..., group, d] · k [..., tokens, d] -> [..., group, tokens], in the operand order that CPUs run fastest."""
    return (k @ q.transpose(-1, -2)).transpose(-1, -2).contiguous()


def page_softmax(scores: torch.Tensor, pages: LivePages) -> Softmax:
    """FP32 softmax over each request's pages: scores [P, kv_heads, group, 16] -> p alike, top and total per request."""
    scores = scores.masked_fill(~pages.valid[:, None, None, :], -torch.inf)
    top = segment_max(scores.amax(-1), pages.rows, pages.num_requests)
    p = torch.exp(scores - top[pages.rows].unsqueeze(-1))
    return Softmax(p, top, segment_sum(p.sum(-1), pages.rows, pages.num_requests))


def metadata(values: torch.Tensor, pages: LivePages) -> torch.Tensor:
    """A page's FP16 scales or offsets [P, kv_heads, 16] as FP32 [P, kv_heads, 1, 16]; 0 outside the region."""
    return values.float().masked_fill(~pages.valid[:, None, :], 0.0).unsqueeze(-2)


def rounded_weights(weights: torch.Tensor, pages: LivePages, operand: str) -> torch.Tensor:
    """p·scale_v [P, kv_heads, group, 16] as the P operand of the value product holds it.

    Each query has one dynamic scale per tile of 64 tokens at absolute positions, its largest weight there. So the
    rounding depends neither on how a kernel splits the context nor on weights far away: a long flat tail behind a
    peaked sink keeps its probability. "fp16" rounds weight / scale to FP16, "u8" to 255 steps (§A.3 "eight-bit
    probability operand"). The softmax denominator comes from unrounded p.
    """
    scale = segment_max(weights.amax(-1), pages.tiles, pages.num_tiles)[pages.tiles].unsqueeze(-1)
    relative = weights / torch.where(scale == 0, 1.0, scale)
    if operand == "u8":
        return (relative * 255).round_() * divided(scale, 255)
    return relative.half().float() * scale
