"""What one call of the cache works on: which tokens to write where, and which requests decode over which pages.

On a CUDA device values are looked at on the current stream: whoever makes them on another stream lets this one wait.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kv4rl.config import PAGE_TOKENS, KVConfig, require, require_integer

CHECK_VARIABLE = "KV4RL_CHECK"  # 1: look at all values in every call, trusted ones too; slow, for debugging
CHECK_EVERY_CALL = os.environ.get(CHECK_VARIABLE) == "1"


class Limits(NamedTuple):
    """What indices into a cache are held to."""

    num_pages: int
    num_slots: int
    entries: int  # of a slot of the side buffer
    widths: tuple[int, int]  # `protected_widths` of its configuration
    device: torch.device


def protected_widths(kv: KVConfig) -> tuple[int, int]:
    """(sink, recent) positions that a side buffer keeps, by which a context is divided: 0 unless there is one."""
    return (kv.sink_tokens, kv.recent_tokens) if kv.protected_tokens else (0, 0)


def _require_int64(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    require(isinstance(tensor, torch.Tensor), name, type(tensor).__name__, f"a tensor of int64 {shape}")
    require(tensor.dtype == torch.int64, f"{name}.dtype", tensor.dtype, "torch.int64")
    require(tuple(tensor.shape) == shape, f"{name}.shape", tuple(tensor.shape), f"{shape}")
    require(tensor.device == device, f"{name}.device", str(tensor.device), f"the cache's, {device}")


def _require_range(name: str, tensor: torch.Tensor, low: int, high: int) -> None:
    """Values in [low, high), naming the first that is not; one look, so that the value named is the value judged."""
    outside = tensor[(tensor < low) | (tensor >= high)].tolist()
    if outside:
        require(False, name, outside[0], f"{low} … {high - 1}")


def _require_different(name: str, values: torch.Tensor, expected: str) -> None:
    found, counts = values.unique(return_counts=True)
    twice = found[counts > 1].tolist()
    require(not twice, name, twice[:1], expected)


def _may_inspect(tensor: torch.Tensor) -> bool:
    """Whether values may be looked at: not while a CUDA graph is being captured."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class _Trusting:
    """Index tensors that are looked at when they are new or were written: kinds always, values unless trusted."""

    _names: tuple[str, ...]
    _trusted = False

    def versions(self) -> tuple[int, ...]:
        """How often each tensor was written in place.

        In inference mode they keep no count, and a caller makes new ones for each step, as the engine does.
        """
        return tuple(0 if tensor.is_inference() else tensor._version for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self._names]

    def trust(self) -> None:
        """Leave the values unchecked from now on: they come from the scheduler, and a look would stall the device."""
        self._trusted = True

    def check(self, rows: int, limits: Limits) -> None:
        """Raise `ValueError` unless there are `rows` rows, and each names places that exist."""
        tensors = self._tensors()
        if self._checked is not None and not CHECK_EVERY_CALL:
            known, *then = self._checked
            same = all(now is before for now, before in zip(tensors, known, strict=True))
            if same and then == [rows, limits, self.versions()]:
                return
        self._check_kinds(rows, limits)
        if CHECK_EVERY_CALL or not self._trusted:
            if not _may_inspect(self.slots):
                return
            self._check_values(limits)
        self._checked = (tensors, rows, limits, self.versions())


def side_entries(positions: torch.Tensor, first_recent: torch.Tensor | int, kv: KVConfig) -> torch.Tensor:
    """Side-buffer entries of `positions` int64 [N], -1 where none is kept (`attention.regions.side_entry`, batched).

    `first_recent`: recent entries are kept only from this position on, so that no ring entry is written twice.
    """
    s, w = kv.sink_tokens, kv.recent_tokens
    if kv.protected_tokens == 0:
        return torch.full_like(positions, -1)
    ring = s + (positions - s) % w if w > 0 else torch.full_like(positions, -1)
    ring = torch.where(positions >= first_recent, ring, -1)
    return torch.where(positions < s, positions, ring)


ROWS = ("page_ids", "offsets", "positions", "slots", "side_entries")


@dataclass
class TokenSlots(_Trusting):
    """Where N new tokens go. Tensors int64 [N] on the cache's device; values are checked unless they are trusted.

    A row with page_id -1 writes nothing. No two rows may name the same place, with `page_each` not even the same page,
    which lets a kernel rewrite more of a page than the token.
    """

    page_ids: torch.Tensor
    offsets: torch.Tensor  # 0 … 15, in the page
    positions: torch.Tensor  # in the request
    slots: torch.Tensor  # the request's row of the side buffer
    side_entries: torch.Tensor  # -1: not kept in the side buffer
    page_each: bool = False
    widths: tuple[int, int] | None = None  # `protected_widths` that `side_entries` are for; None: not stated
    _names = ROWS
    _checked: tuple | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def for_chunk(
        cls, page_table_row: Sequence[int] | torch.Tensor, slot: int, start: int, stop: int, kv: KVConfig
    ) -> "TokenSlots":
        """Positions [start, stop) of one request, whose pages are `page_table_row`.

        Only p < s and p >= stop - w get a side entry: older recent positions would be overwritten within the chunk.
        Raises `ValueError` if the row holds too few pages.
        """
        row = torch.as_tensor(page_table_row, dtype=torch.int64)
        for name, value in (("slot", slot), ("start", start), ("stop", stop)):
            require_integer(value, name, 0)
        require(start <= stop, "start, stop", (start, stop), "0 <= start <= stop")
        require(stop <= len(row) * PAGE_TOKENS, "stop", stop, f"at most {len(row)} pages x {PAGE_TOKENS} tokens")
        positions = torch.arange(start, stop, device=row.device)
        return cls(
            page_ids=row[positions // PAGE_TOKENS],
            offsets=positions % PAGE_TOKENS,
            positions=positions,
            slots=torch.full_like(positions, slot),
            side_entries=side_entries(positions, stop - kv.recent_tokens, kv),
            widths=protected_widths(kv),
        )

    @classmethod
    def for_decode(cls, batch: "DecodeBatch", kv: KVConfig) -> "TokenSlots":
        """The newest position of every request of `batch`, context_tokens - 1; padding rows write nothing.

        Raises `ValueError` for a context that its row of pages cannot hold, unless the batch is trusted.
        """
        batch.check_contexts()
        positions = (batch.context_tokens - 1).clamp(min=0)
        pages = batch.page_table.gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0]
        return cls(
            page_ids=torch.where(batch.context_tokens > 0, pages, -1),
            offsets=positions % PAGE_TOKENS,
            positions=positions,
            slots=batch.slots,
            side_entries=side_entries(positions, 0, kv),
            page_each=True,
            widths=protected_widths(kv),
        )

    @staticmethod
    def cat(parts: "Sequence[TokenSlots]") -> "TokenSlots":
        """Several requests' tokens in one write, in order."""
        require(len(parts) > 0, "parts", parts, "at least one TokenSlots")
        widths = {part.widths for part in parts} - {None}
        require(len(widths) <= 1, "side_entries for (sink, recent)", sorted(widths), "the same in all parts")
        joined = (torch.cat([getattr(part, name) for part in parts]) for name in ROWS)
        return TokenSlots(*joined, widths=next(iter(widths), None))

    def _check_kinds(self, rows: int, limits: Limits) -> None:
        for name in ROWS:
            _require_int64(name, getattr(self, name), (rows,), limits.device)
        made_for = self.widths in (None, limits.widths)
        require(made_for, "side_entries for (sink, recent)", self.widths, f"the cache's, {limits.widths}")

    def _check_values(self, limits: Limits) -> None:
        _require_range("page_ids", self.page_ids, -1, limits.num_pages)
        _require_range("offsets", self.offsets, 0, PAGE_TOKENS)
        _require_range("side_entries", self.side_entries, -1, limits.entries)
        _require_range("slots", self.slots[(self.page_ids >= 0) & (self.side_entries >= 0)], 0, limits.num_slots)
        kept = self.page_ids >= 0
        if self.page_each:
            _require_different("page_ids", self.page_ids[kept], "a page of its own for each request's token")
        places = self.page_ids * PAGE_TOKENS + self.offsets
        _require_different(f"page_ids * {PAGE_TOKENS} + offsets", places[kept], "a place of its own for each token")
        kept = kept & (self.side_entries >= 0)
        entries = (self.slots * limits.entries + self.side_entries)[kept]
        _require_different(f"slots * {limits.entries} + side_entries", entries, "an entry of its own for each token")


@dataclass
class DecodeBatch(_Trusting):
    """B requests of one query token each, on the cache's device; values are checked unless they are trusted."""

    page_table: torch.Tensor  # int64 [B, max_pages], padded with -1
    context_tokens: torch.Tensor  # int64 [B], with the token just written; 0: a padding row
    slots: torch.Tensor  # int64 [B], rows of the side buffer
    _names = ("page_table", "context_tokens", "slots")
    _checked: tuple | None = field(default=None, init=False, repr=False, compare=False)

    def _check_kinds(self, rows: int, limits: Limits) -> None:
        table = self.page_table
        require(isinstance(table, torch.Tensor), "page_table", type(table).__name__, "a tensor of int64 [B, max_pages]")
        require(table.dim() == 2, "page_table.shape", tuple(table.shape), "[B, max_pages]")
        _require_int64("page_table", table, (rows, table.shape[1]), limits.device)
        dense = table.shape[1] <= 1 or table.stride(1) == 1
        require(dense, "page_table.stride", table.stride(), "a dense last dimension")
        _require_int64("context_tokens", self.context_tokens, (rows,), limits.device)
        _require_int64("slots", self.slots, (rows,), limits.device)

    def check_contexts(self) -> None:
        """Raise `ValueError` for a context beyond the page table, unless the batch is trusted."""
        if _may_inspect(self.context_tokens) and (CHECK_EVERY_CALL or not self._trusted):
            _require_range("context_tokens", self.context_tokens, 0, self.page_table.shape[1] * PAGE_TOKENS + 1)

    def _check_values(self, limits: Limits) -> None:
        """Pages beyond a context and slots of padding rows are nobody's business, nor slots without a side buffer."""
        max_pages = self.page_table.shape[1]
        self.check_contexts()
        first_position = torch.arange(max_pages, device=self.page_table.device) * PAGE_TOKENS
        used = first_position < self.context_tokens[:, None]
        _require_range("page_table", self.page_table[used], 0, limits.num_pages)
        if limits.entries:
            _require_range("slots", self.slots[self.context_tokens > 0], 0, limits.num_slots)
