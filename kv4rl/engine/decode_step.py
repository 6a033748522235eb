"""The pure decode step over memory that never moves: what a CUDA graph captures, and what a CPU runs as it is.

Everything a step depends on lies in tensors made once: token ids, contexts, slots, sampling keys, places of the new
tokens, page tables, results. `load` writes them (one host-to-device copy, and the pages handed out since the last
step), `run` only launches; neither waits for the device, so a step can be loaded while the one before it runs. What
the host knows is worked out there: on the device, a dozen kernels of a few hundred integers would lengthen every step.
A batch is padded to a bucket with rows of context 0, which write nothing and attend to nothing; so a few graphs serve
every batch (§A.2 "Multiple CUDA graphs cover different decode batch sizes").
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from kv4rl.cache.batch import DecodeBatch, TokenSlots, protected_widths, side_entries
from kv4rl.cache.kv_cache import KVCache
from kv4rl.config import PAGE_TOKENS, KVConfig, require
from kv4rl.engine.draw import DrawKeys, ForcedEnd, Sampler, draw
from kv4rl.engine.page_table import NEVER, PageTable
from kv4rl.engine.sampler import Sampling, sample
from kv4rl.engine.transfer import upload
from kv4rl.model.decoder import Decoder
from kv4rl.model.pointwise import NormRotate

# A row that is no request: token, context, slot, noise key, end; then its token's page, offset, position, side entry.
PADDING = np.array([[0], [0], [0], [0], [NEVER], [-1], [0], [0], [-1]])


@runtime_checkable
class PlannedOnHost(Protocol):
    """A cache backend that divides its work on the host, before the step's launches (FlashInfer does)."""

    def prepare(self, cache: KVCache, contexts: np.ndarray, page_ids: np.ndarray, *, static: bool = True) -> None:
        """contexts int64 [rows], 0 for padding; page_ids int64 [rows, width], -1 padded.

        `static`: what the step reads stays where it is for this number of rows, so that a graph can be replayed.
        """


def plans_on_host(backend: object) -> bool:
    """Whether a backend is `PlannedOnHost`; isinstance of a protocol takes 40 us, which every step would pay."""
    return hasattr(backend, "prepare")


def _places_of_newest(table: PageTable, slots: np.ndarray, context: np.ndarray, kv: KVConfig) -> tuple:
    """Page ids, offsets, positions and side entries, int64 [B] each: `TokenSlots.for_decode` on the host."""
    positions = context - 1
    entries = side_entries(torch.from_numpy(positions), 0, kv).numpy()
    return table.ids[slots, positions // PAGE_TOKENS], positions % PAGE_TOKENS, positions, entries


@dataclass(frozen=True)
class StepSize:
    """Shape of a step: padded rows, and columns of the page table."""

    rows: int
    pages: int


def default_buckets(most: int) -> list[int]:
    """Batch sizes up to `most`: powers of two to 8, then steps of 8 rows or at most an eighth: padding stays small."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, most, 32)]
    return [size for size in sizes if size < most] + [most]


class StepAttention:
    """`Attend` of one pure decode step; `raw` where the cache's backend takes q and k as projected, else None."""

    def __init__(self, cache: KVCache, where: TokenSlots, batch: DecodeBatch):
        self._cache, self._where, self._batch = cache, where, batch

    @property
    def raw(self):
        return self._attend if self._cache.takes_raw else None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attend(layer, q, k, v, None)

    def _attend(self, layer: int, q, k, v, before: NormRotate | None) -> torch.Tensor:
        return self._cache.write_and_decode(layer, q, k, v, self._where, self._batch, before)


class DecodeStep:
    """The decode step of one decoder (or shard) and cache, for at most `cache.num_slots` rows.

    `buckets`: row counts that batches are padded to, ascending; None pads nothing and reads only the pages in use,
    which is what a CPU wants. `max_pages`: pages of the longest request it takes (`fits`).
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        max_pages: int,
        buckets: Sequence[int] | None = None,
        forced: ForcedEnd | None = None,
        sampler: Sampler = sample,
    ):
        slots, device = cache.num_slots, cache.device
        self.decoder, self.cache, self.max_pages = decoder, cache, max_pages
        self.forced, self.sampler = forced, sampler
        self.buckets = None if buckets is None else sorted(buckets)
        if self.buckets is not None:
            fits = self.buckets and self.buckets[0] >= 1 and self.buckets[-1] == slots
            require(fits, "buckets", self.buckets, f"row counts >= 1, the last of them max_active_requests={slots}")
        self._vectors = torch.zeros(len(PADDING), slots, dtype=torch.int64, device=device)
        self._slot_pages = torch.full((slots, max_pages), -1, dtype=torch.int64, device=device)
        self._page_table = torch.full((slots, max_pages), -1, dtype=torch.int64, device=device)
        self._results = torch.zeros(2, slots, dtype=torch.float64, device=device)

    def fits(self, table: PageTable, slots: np.ndarray) -> bool:
        """Whether no request of the step holds more than `max_pages` pages."""
        return int(table.held[slots].max(initial=0)) <= self.max_pages

    def load(
        self,
        table: PageTable,
        slots: np.ndarray,
        noise: np.ndarray,
        ends: np.ndarray,
        previous: np.ndarray | None = None,
    ) -> StepSize:
        """Bring the buffers up to date for the decode rows `slots` int64 [B]; `noise`, `ends` int64 by slot.

        `previous` int64 [B]: the rows of the latest `run` that sampled the tokens now to be written; the table knows
        nothing of them yet. None: the table has them.
        """
        rows, pages = len(slots), int(table.held[slots].max(initial=1))
        if self.buckets is not None:
            rows, pages = self.buckets[bisect_left(self.buckets, rows)], self.max_pages
        host = np.tile(PADDING, rows)
        context = table.context[slots] + (previous is not None)
        tokens = table.last_token[slots] if previous is None else previous
        places = _places_of_newest(table, slots, context, self.cache.kv)
        host[:, : len(slots)] = (tokens, context, slots, noise[slots], ends[slots], *places)
        self._vectors[:, :rows] = upload(host, self.cache.device)
        if previous is not None:  # a padding row takes the token of row 0: any that exists
            self._vectors[0, :rows] = self._results[0].index_select(0, self._vectors[0, :rows])
        self._load_pages(table)
        if plans_on_host(self.cache.backend):
            self.cache.backend.prepare(self.cache, host[1], table.ids[host[2]])
        return StepSize(rows, pages)

    def load_padding(self, rows: int) -> StepSize:
        """Fill the buffers with `rows` rows that are no requests."""
        self._vectors[:, :rows] = upload(np.tile(PADDING, rows), self.cache.device)
        if plans_on_host(self.cache.backend):
            empty = np.zeros(rows, dtype=np.int64)
            self.cache.backend.prepare(self.cache, empty, empty[:, None] - 1)
        return StepSize(rows, self.max_pages)

    def run(self, size: StepSize, sampling: Sampling) -> torch.Tensor:
        """Launch the step; tokens and log-probabilities as float64 [2, rows], in memory that the next step reuses."""
        ids, context, slots, noise, ends, pages, offsets, positions, entries = self._vectors[:, : size.rows]
        table = self._page_table[: size.rows, : size.pages]
        torch.index_select(self._slot_pages[:, : size.pages], 0, slots, out=table)
        batch = DecodeBatch(table, context, slots)
        widths = protected_widths(self.cache.kv)
        where = TokenSlots(pages, offsets, positions, slots, entries, page_each=True, widths=widths)
        if context.is_cuda:  # the scheduler's own values: looking at them would make the host wait
            batch.trust()
            where.trust()
        attend = StepAttention(self.cache, where, batch)
        logits = self.decoder.sampling_logits(self.decoder(ids, where.positions, attend))
        drawn = draw(logits, DrawKeys(noise, context, ends), sampling, forced=self.forced, sampler=self.sampler)
        results = self._results[:, : size.rows]
        results.copy_(drawn)
        return results

    def _load_pages(self, table: PageTable) -> None:
        """Write the pages that slots were given since the last call; what a slot held before needs no clearing."""
        slots, columns, pages = table.drain()
        keep = columns < self.max_pages
        if keep.any():
            changes = upload(np.stack((slots, columns, pages))[:, keep], self.cache.device)
            self._slot_pages[changes[0], changes[1]] = changes[2]
