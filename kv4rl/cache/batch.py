"""What one call of the cache works on: which tokens to write where, and which requests decode over which pages.

On a CUDA device values are looked at on the current stream: whoever makes them on another stream lets this one wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kv4rl.config import PAGE_TOKENS, KVConfig, require


def _require_int64(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    require(tensor.dtype == torch.int64, f"{name}.dtype", tensor.dtype, "torch.int64")
    require(tuple(tensor.shape) == shape, f"{name}.shape", tuple(tensor.shape), f"{shape}")


def _require_range(name: str, tensor: torch.Tensor, low: int, high: int) -> None:
    """Values in [low, high), naming the first that is not; one look, so that the value named is the value judged."""
    outside = tensor[(tensor < low) | (tensor >= high)].tolist()
    if outside:
        require(False, name, outside[0], f"{low} … {high - 1}")


def _may_inspect(tensor: torch.Tensor) -> bool:
    """Whether values may be looked at: not while a CUDA graph is being captured."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class _Trusting:
    """Index tensors whose values are looked at once, or not at all."""

    _trusted = False

    def trust(self) -> None:
        """Leave the values unchecked from now on: they come from the scheduler, and a look would stall the device."""
        self._trusted = True


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


@dataclass
class TokenSlots(_Trusting):
    """Where N new tokens go. All fields int64 [N]; values are checked once, against the first cache that uses them.

    A row with page_id -1 writes nothing. No two rows may name the same place, with `page_each` not even the same page,
    which lets a kernel rewrite more of a page than the token.
    """

    page_ids: torch.Tensor
    offsets: torch.Tensor  # 0 … 15, in the page
    positions: torch.Tensor  # in the request
    slots: torch.Tensor  # the request's row of the side buffer
    side_entries: torch.Tensor  # -1: not kept in the side buffer
    page_each: bool = False
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
        require(0 <= start <= stop, "start, stop", (start, stop), "0 <= start <= stop")
        require(stop <= len(row) * PAGE_TOKENS, "stop", stop, f"at most {len(row)} pages x {PAGE_TOKENS} tokens")
        positions = torch.arange(start, stop, device=row.device)
        return cls(
            page_ids=row[positions // PAGE_TOKENS],
            offsets=positions % PAGE_TOKENS,
            positions=positions,
            slots=torch.full_like(positions, slot),
            side_entries=side_entries(positions, stop - kv.recent_tokens, kv),
        )

    @classmethod
    def for_decode(cls, batch: "DecodeBatch", kv: KVConfig) -> "TokenSlots":
        """The newest position of every request of `batch`, context_tokens - 1; padding rows write nothing."""
        positions = (batch.context_tokens - 1).clamp(min=0)
        pages = batch.page_table.gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0]
        return cls(
            page_ids=torch.where(batch.context_tokens > 0, pages, -1),
            offsets=positions % PAGE_TOKENS,
            positions=positions,
            slots=batch.slots,
            side_entries=side_entries(positions, 0, kv),
            page_each=True,
        )

    @staticmethod
    def cat(parts: "Sequence[TokenSlots]") -> "TokenSlots":
        """Several requests' tokens in one write, in order."""
        require(len(parts) > 0, "parts", parts, "at least one TokenSlots")
        names = ("page_ids", "offsets", "positions", "slots", "side_entries")
        return TokenSlots(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def check(self, num_tokens: int, num_pages: int, num_slots: int, num_entries: int) -> None:
        """Raise `ValueError` unless every row names a place that exists."""
        bounds = (num_tokens, num_pages, num_slots, num_entries)
        if self._checked == bounds:
            return
        for name in ("page_ids", "offsets", "positions", "slots", "side_entries"):
            _require_int64(name, getattr(self, name), (num_tokens,))
        if not self._trusted and _may_inspect(self.page_ids):
            _require_range("page_ids", self.page_ids, -1, num_pages)
            _require_range("offsets", self.offsets, 0, PAGE_TOKENS)
            _require_range("side_entries", self.side_entries, -1, num_entries)
            _require_range("slots", self.slots[(self.page_ids >= 0) & (self.side_entries >= 0)], 0, num_slots)
            self._require_page_each()
            self._checked = bounds

    def _require_page_each(self) -> None:
        if self.page_each:
            pages, counts = self.page_ids[self.page_ids >= 0].unique(return_counts=True)
            twice = pages[counts > 1].tolist()
            require(not twice, "page_ids", twice[:1], "a page of its own for the newest token of each request")


@dataclass
class DecodeBatch(_Trusting):
    """B requests of one query token each; values are checked once, against the first cache that uses them."""

    page_table: torch.Tensor  # int64 [B, max_pages], padded with -1
    context_tokens: torch.Tensor  # int64 [B], with the token just written; 0: a padding row
    slots: torch.Tensor  # int64 [B], rows of the side buffer
    _checked: tuple | None = field(default=None, init=False, repr=False, compare=False)

    def check(self, num_requests: int, num_pages: int, num_slots: int | None) -> None:
        """Raise `ValueError` unless every context lies in pages that exist (num_slots None: no side buffer)."""
        bounds = (num_requests, num_pages, num_slots)
        if self._checked == bounds:
            return
        require(self.page_table.dim() == 2, "page_table.shape", tuple(self.page_table.shape), "[B, max_pages]")
        max_pages = self.page_table.shape[1]
        _require_int64("page_table", self.page_table, (num_requests, max_pages))
        _require_int64("context_tokens", self.context_tokens, (num_requests,))
        _require_int64("slots", self.slots, (num_requests,))
        if not self._trusted and _may_inspect(self.page_table):
            _require_range("context_tokens", self.context_tokens, 0, max_pages * PAGE_TOKENS + 1)
            first_position = torch.arange(max_pages, device=self.page_table.device) * PAGE_TOKENS
            used = first_position < self.context_tokens[:, None]
            _require_range("page_table", self.page_table[used], 0, num_pages)
            if num_slots is not None:
                _require_range("slots", self.slots[self.context_tokens > 0], 0, num_slots)
            self._checked = bounds
