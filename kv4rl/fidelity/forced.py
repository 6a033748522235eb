"""Force one cache format along given token histories and keep the logits at chosen states (§B.5, the deployed probe).

Each prompt is prefilled unquantised and written to the cache; then every response token takes one decode step through
the cache's own write and decode, so that an arm's own quantised keys and values feed its later hidden states, exactly
as in rollout. Prompts go in one batch; the state before the first response token is the prefill's, as in the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kv4rl.cache.kv_cache import DecodeBatch, KVCache, TokenSlots
from kv4rl.config import PAGE_TOKENS, KVConfig, require
from kv4rl.fidelity.corpus import POSITIONS, History
from kv4rl.model.attend import PackedCausal
from kv4rl.model.decoder import Decoder

Progress = Callable[[int, int], None]  # (steps done, steps in all)


def _pages(history: History) -> int:
    return -(-(len(history.prompt) + len(history.response)) // PAGE_TOKENS)


def _page_table(histories: Sequence[History], cache: KVCache) -> Tensor:
    """Pages for every history's whole length, int64 [requests, max_pages], padded with -1."""
    counts = [_pages(history) for history in histories]
    table = torch.full((len(histories), max(counts)), -1, dtype=torch.int64)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor(cache.allocator.allocate(count))
    return table


@dataclass(frozen=True)
class Prefill:
    """What the unquantised prefill of all prompts leaves; equal for every arm, so it is computed once."""

    keys: list[Tensor]  # one per layer, [prompt tokens of all histories, kv_heads, d], after RoPE
    values: list[Tensor]
    last_hidden: Tensor  # [histories, hidden], after each prompt's last token
    attention: list[Tensor] | None = None  # one per layer, [kv_heads, prompt tokens]: mass each position received


@torch.inference_mode()
def prefill(decoder: Decoder, histories: Sequence[History], *, with_attention: bool = False) -> Prefill:
    """Run all prompts through the decoder in one packed forward pass. Raises ValueError on an empty list.

    `with_attention` keeps what each position received from the prompt's queries, summed over a KV head's group.
    """
    require(len(histories) > 0, "histories", list(histories), "at least one history")
    bounds = [0, *accumulate(len(h.prompt) for h in histories)]
    causal, keys, values, attention = PackedCausal(bounds), [], [], []

    def attend(layer, q, k, v):
        keys.append(k)
        values.append(v)
        if with_attention:
            attention.append(torch.cat([_received(q[a:b], k[a:b]) for a, b in pairwise(bounds)], -1))
        return causal(layer, q, k, v)

    ids = torch.tensor([token for h in histories for token in h.prompt], device=decoder.device)
    positions = torch.cat([torch.arange(len(h.prompt)) for h in histories]).to(decoder.device)
    hidden = decoder(ids, positions, attend)
    last = hidden[torch.tensor(bounds[1:], device=hidden.device) - 1]
    return Prefill(keys, values, last, attention if with_attention else None)


def _received(q: Tensor, k: Tensor) -> Tensor:
    """Causal attention mass of each position: q [n, query_heads, d], k [n, kv_heads, d] -> [kv_heads, n]."""
    grouped = q.float().unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
    scores = grouped @ (k.float().permute(1, 2, 0) * q.shape[-1] ** -0.5).unsqueeze(1)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill_(future, -torch.inf), -1).sum((1, 2))


def _write_prompts(cache: KVCache, histories: Sequence[History], table: Tensor, prompts: Prefill) -> None:
    chunks = [TokenSlots.for_chunk(table[i], i, 0, len(h.prompt), cache.kv) for i, h in enumerate(histories)]
    where = TokenSlots.cat(chunks)
    for layer, (k, v) in enumerate(zip(prompts.keys, prompts.values, strict=True)):
        cache.write(layer, k, v, where)


def _decode_step(decoder: Decoder, cache: KVCache, ids: Tensor, batch: DecodeBatch) -> Tensor:
    """One forced token per request of `batch`; hidden [B, hidden]."""
    where = TokenSlots.for_decode(batch, cache.kv)

    def attend(layer, q, k, v):
        cache.write(layer, k, v, where)
        return cache.decode(layer, q, batch)

    return decoder(ids, where.positions, attend)


class _StateLogits:
    """Logits [histories, 8, vocab], float32 on the CPU, filled as the states come by."""

    def __init__(self, decoder: Decoder, histories: Sequence[History]):
        self.decoder = decoder
        self.logits = torch.empty(len(histories), POSITIONS, decoder.config.vocab_size)
        self.state_of = [{position: j for j, position in enumerate(h.positions)} for h in histories]

    def keep(self, index: int, rows: Sequence[int], hidden: Tensor) -> None:
        """Keep those of `rows` (histories, one hidden state each) that have a state at generated-prefix `index`."""
        wanted = [(i, row, self.state_of[row][index]) for i, row in enumerate(rows) if index in self.state_of[row]]
        if wanted:
            computed = self.decoder.logits(hidden[[i for i, _, _ in wanted]]).cpu()
            for values, (_, row, state) in zip(computed, wanted, strict=True):
                self.logits[row, state] = values


@torch.inference_mode()
def forced_logits(
    decoder: Decoder,
    kv: KVConfig,
    histories: Sequence[History],
    *,
    prompts: Prefill | None = None,
    backend: str = "auto",
    progress: Progress | None = None,
) -> Tensor:
    """Full-vocabulary logits at the eight states of every history, float32 [histories, 8, vocab], on the CPU.

    `prompts`: the histories' `prefill`, if it is at hand. Raises ValueError on an empty list of histories.
    """
    prompts = prefill(decoder, histories) if prompts is None else prompts
    device = decoder.device
    pages = sum(_pages(history) for history in histories)
    sizes = {"num_pages": pages, "num_slots": len(histories)}
    cache = KVCache(kv, decoder.cache_shape(), **sizes, device=device, backend=backend)
    table = _page_table(histories, cache).to(device)
    _write_prompts(cache, histories, table, prompts)
    states = _StateLogits(decoder, histories)
    states.keep(0, range(len(histories)), prompts.last_hidden)
    steps = max(len(h.response) for h in histories) - 1
    for index in range(1, steps + 1):
        rows = [row for row, h in enumerate(histories) if index < len(h.response)]
        ids = torch.tensor([histories[row].response[index - 1] for row in rows], device=device)
        context = torch.tensor([len(histories[row].prompt) + index for row in rows], device=device)
        slots = torch.tensor(rows, device=device)
        states.keep(index, rows, _decode_step(decoder, cache, ids, DecodeBatch(table[slots], context, slots)))
        if progress is not None:
            progress(index, steps)
    return states.logits
