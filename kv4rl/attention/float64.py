"""Float64 attention over the dequantised cache, one request at a time: what the reference and the kernels are
measured against, and the BF16 attention on the same values whose error is their yardstick."""

import torch

from kv4rl.attention.reference import prepare_query
from kv4rl.attention.regions import regions, side_entry
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import require
from kv4rl.formats.hadamard import hadamard_matrix

QUERIES = ("exact", "int8")


def dequantised_context(cache, layer: int, batch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of request `row` as attention reads them: (k, v), each float64 [n, kv_heads, d].

    Sink and recent positions come from the side buffer, all others from the main cache; keys are in the basis they
    are stored in (rotated, except for `bf16`).
    """
    n = int(batch.context_tokens[row])
    k, v = (
        pages.transpose(1, 2).flatten(0, 1)[:n].double()
        for pages in cache.main.read(layer, batch.page_table[row, : pages_for(n)])
    )
    kv = cache.kv
    if kv.protected_tokens:
        split = regions(n, kv.sink_tokens, kv.recent_tokens)
        positions = [*range(*split.sink), *range(*split.recent)]
        entries = [side_entry(p, kv.sink_tokens, kv.recent_tokens) for p in positions]
        side_k, side_v = cache.side.read(layer, batch.slots[row, None])
        k[positions] = side_k[0][:, entries].transpose(0, 1).double()
        v[positions] = side_v[0][:, entries].transpose(0, 1).double()
    return k, v


def stored_basis_query(cache, q: torch.Tensor, query: str = "exact") -> torch.Tensor:
    """q [B, query_heads, d] in the basis of the stored keys, float64 [B, kv_heads, group, d].

    "exact": only rotated, in float64. "int8": the dequantised codes that the integer path really uses.
    """
    require(query in QUERIES, "query", query, " or ".join(QUERIES))
    if cache.kv.precision == "bf16":
        return q.double().unflatten(1, (cache.shape.kv_heads, -1))
    if query == "int8":
        codes = prepare_query(q, cache.shape.kv_heads)
        return codes.codes.double() * codes.scale.double().unsqueeze(-1)
    h = hadamard_matrix(q.shape[-1], dtype=torch.float64, device=q.device)
    return (q.double() @ h).unflatten(1, (cache.shape.kv_heads, -1))


def oracle(cache, layer: int, q: torch.Tensor, batch, query: str = "exact") -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention on the dequantised cache: (out [B, query_heads, d], natural-log lse [B, query_heads]).

    Same arguments as `KVCache.decode`; `query` as in `stored_basis_query`. A context of 0 gives (0, -inf).
    """
    return _each_request(cache, layer, batch, stored_basis_query(cache, q, query), _attend_float64)


def bf16_peer(cache, layer: int, q: torch.Tensor, batch, query: str = "exact") -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 attention on the dequantised cache, as a BF16 kernel would do it: q, K, V, P and the output rounded to
    BF16, sums in FP32 (§5.1 "controlled cache-representation ablations"). Shapes and types as `oracle`."""
    return _each_request(cache, layer, batch, stored_basis_query(cache, q, query), _attend_bf16)


def _each_request(cache, layer, batch, q, attend) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:-1], -torch.inf)
    for row, n in enumerate(batch.context_tokens.tolist()):
        if n > 0:
            out[row], lse[row] = attend(q[row], *dequantised_context(cache, layer, batch, row))
    return out.flatten(1, 2), lse.flatten(1, 2)


def _attend_float64(q, k, v):
    """q [kv_heads, group, d], k and v [n, kv_heads, d], all float64."""
    scores = torch.einsum("hgd,nhd->hgn", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v), scores.logsumexp(-1)


def _attend_bf16(q, k, v):
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    scores = torch.einsum("hgd,nhd->hgn", q, k) * q.shape[-1] ** -0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    out = torch.einsum("hgn,nhd->hgd", p.bfloat16().float(), v) / p.sum(-1, keepdim=True)
    return out.bfloat16().double(), scores.logsumexp(-1).double()
