"""One step as tensors: the rows of a plan, and the attention that fills and reads the cache for them."""

from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch

from kv4rl.cache.batch import DecodeBatch, TokenSlots, side_entries
from kv4rl.cache.kv_cache import CacheShape, KVCache
from kv4rl.config import PAGE_TOKENS, KVConfig
from kv4rl.engine.decode_step import plans_on_host
from kv4rl.engine.page_table import PageTable
from kv4rl.engine.scheduler import Chunk, StepPlan
from kv4rl.engine.transfer import upload
from kv4rl.model.attend import PackedCausal, causal_chunk


class StepBatch:
    """Rows of one forward pass: the decode rows, then the prefill chunks one after another.

    `input_ids`, `positions` int64 [N]; `sampled_rows` int64 [S]: the rows whose logits give `plan.sampled` a token;
    `sampled_positions` int64 [S]: where these tokens go. `attend` is what the decoder calls: every row is written to
    the cache; decode rows read it, prefill rows attend to their own prefix unquantised (§A.3 "Protected path and
    reconstruction").
    """

    def __init__(self, plan: StepPlan, table: PageTable, cache: KVCache, device: torch.device):
        self._cache = cache
        self._decode_rows = len(plan.slots)
        context = table.context[plan.slots]
        arrays = (table.rows(plan.slots), context, plan.slots)
        if len(context) and plans_on_host(cache.backend):
            cache.backend.prepare(cache, context, arrays[0], static=False)
        self._decode = DecodeBatch(*(upload(array, device) for array in arrays))
        if device.type == "cuda":  # the scheduler's own values: looking at them would make the host wait
            self._decode.trust()
        self._where = _token_slots(plan, table, self._decode, cache.kv, device)
        if device.type == "cuda":
            self._where.trust()
        self._spans = _prefill_spans(plan.chunks, self._decode_rows, cache.shape, device)
        ids, positions, sampled, targets = [table.last_token[plan.slots]], [context - 1], [*range(len(context))], []
        row = len(context)
        for chunk in plan.chunks:
            ids.append(np.array(chunk.entry.request.known_tokens(chunk.start, chunk.stop), dtype=np.int64))
            positions.append(np.arange(chunk.start, chunk.stop))
            row += chunk.stop - chunk.start
            if chunk.last:
                sampled.append(row - 1)
                targets.append(chunk.stop)
        self.input_ids = upload(np.concatenate(ids), device)
        self.positions = upload(np.concatenate(positions), device)
        self.sampled_rows = upload(np.array(sampled, dtype=np.int64), device)
        self.sampled_positions = upload(np.concatenate((context, np.array(targets, np.int64))), device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [N, query_heads, d], k and v [N, kv_heads, d] -> [N, query_heads, d]."""
        self._cache.write(layer, k, v, self._where)
        rows = self._decode_rows
        out = [self._cache.decode(layer, q[:rows], self._decode)] if rows else []
        for begin, end, causal in self._spans:
            out.append(causal(layer, q[begin:end], k[begin:end], v[begin:end]))
        return out[0] if len(out) == 1 else torch.cat(out)


@dataclass(frozen=True)
class PartialPrefill:
    """Attention of a chunk that is not a whole prefix: over the prefix's own K/V, kept in the model's dtype.

    Quantisation then never reaches the hidden states of a prefill, however small its chunks are.
    """

    chunk: Chunk

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        start, stop = self.chunk.start, self.chunk.stop
        keys, values = self.chunk.entry.workspace[:, layer]  # [prefix_tokens, kv_heads, d] each
        keys[start:stop], values[start:stop] = k, v
        return causal_chunk(q, keys[:stop], values[:stop], start)


def _prefill_spans(chunks: list[Chunk], row: int, shape: CacheShape, device: torch.device) -> list[tuple]:
    """(first row, end row, attend) of the prefill rows; neighbouring whole prefixes share one packed call."""
    spans = []
    for whole, group in groupby(chunks, key=lambda chunk: chunk.start == 0 and chunk.last):
        members = list(group)
        bounds = [0, *accumulate(chunk.stop - chunk.start for chunk in members)]
        if whole:
            spans.append((row, row + bounds[-1], PackedCausal(bounds)))
        else:
            for chunk, (begin, end) in zip(members, pairwise(bounds), strict=True):
                _ensure_workspace(chunk, shape, device)
                spans.append((row + begin, row + end, PartialPrefill(chunk)))
        row += bounds[-1]
    return spans


def _ensure_workspace(chunk: Chunk, shape: CacheShape, device: torch.device) -> None:
    """K and V of the whole prefix, [2, layers, prefix_tokens, kv_heads, d]; the scheduler bounds and drops them."""
    entry = chunk.entry
    if entry.workspace is None:
        sizes = (2, shape.num_layers, entry.prefix_tokens, shape.kv_heads, shape.head_dim)
        entry.workspace = torch.empty(sizes, dtype=shape.dtype, device=device)


def _token_slots(
    plan: StepPlan, table: PageTable, decode: DecodeBatch, kv: KVConfig, device: torch.device
) -> TokenSlots:
    """Where every row of the step is written."""
    parts = [TokenSlots.for_decode(decode, kv)] if plan.decode else []
    if plan.chunks:
        parts.append(_chunk_slots(plan.chunks, table, kv, device))
    return TokenSlots.cat(parts)


def _chunk_slots(chunks: list[Chunk], table: PageTable, kv: KVConfig, device: torch.device) -> TokenSlots:
    """`TokenSlots.for_chunk` of all chunks at once: a step may hold a hundred, and the device waits for it."""
    lengths = [chunk.stop - chunk.start for chunk in chunks]
    each = lambda values: np.repeat(np.fromiter(values, np.int64, len(chunks)), lengths)
    positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
    slots, stops = each(chunk.entry.slot for chunk in chunks), each(chunk.stop for chunk in chunks)
    kept = side_entries(torch.from_numpy(positions), torch.from_numpy(stops - kv.recent_tokens), kv)
    fields = (table.ids[slots, positions // PAGE_TOKENS], positions % PAGE_TOKENS, positions, slots, kept.numpy())
    return TokenSlots(*(upload(field, device) for field in fields))
