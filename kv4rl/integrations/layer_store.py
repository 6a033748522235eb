"""One layer's quantised keys and values of a batch of contexts that grow together (§5.1 - §5.3)."""

import torch

from kv4rl.cache.batch import DecodeBatch, TokenSlots, side_entries
from kv4rl.cache.kv_cache import CacheShape, KVCache
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import PAGE_TOKENS, KVConfig, require
from kv4rl.formats.hadamard import rotate

SIDE_FIELDS = ("k_codes", "v_codes", "k_scale", "v_scale")


class LayerStore:
    """A one-layer `KVCache` whose row b owns pages b * P … b * P + P - 1; P follows the longest context.

    `padding` int64 [rows]: columns of each row that precede its first token. They are not stored, and positions count
    from the first token.
    """

    def __init__(self, kv: KVConfig, *, padding: torch.Tensor, kv_heads: int, head_dim: int, dtype: torch.dtype):
        self.kv = kv
        self.padding = padding
        self.columns = 0  # padding and tokens seen so far, the same for every row
        self.shape = CacheShape(1, kv_heads, kv_heads, head_dim, dtype)
        self.pages = 1  # P
        self.cache = self._make_cache(self.rows, self.pages)

    @property
    def rows(self) -> int:
        return len(self.padding)

    @property
    def tokens(self) -> torch.Tensor:
        """Stored tokens of each row, int64 [rows]."""
        return (self.columns - self.padding).clamp(min=0)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def decode_batch(self) -> DecodeBatch:
        """The stored contexts, as `KVCache.decode` and `attention.float64.oracle` take them."""
        page_table = torch.arange(self.rows * self.pages, device=self.padding.device).view(self.rows, self.pages)
        return DecodeBatch(page_table, self.tokens, torch.arange(self.rows, device=self.padding.device))

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the next columns: k, v [rows, kv_heads, columns, d], keys after RoPE, not rotated."""
        columns = k.shape[-2]
        positions = torch.arange(self.columns, self.columns + columns, device=k.device) - self.padding[:, None]
        self.columns += columns
        self._resize()
        entries = side_entries(positions, self.tokens[:, None] - self.kv.recent_tokens, self.kv)
        real = positions >= 0
        row = torch.arange(self.rows, device=k.device)[:, None].expand_as(positions)[real]
        positions = positions[real]
        page_ids = row * self.pages + positions // PAGE_TOKENS
        where = TokenSlots(page_ids, positions % PAGE_TOKENS, positions, row, entries[real])
        self.cache.write(0, k.transpose(1, 2)[real], v.transpose(1, 2)[real], where)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads at this context: (k, v), float32 [rows, kv_heads, columns, d], keys not rotated.

        Sink and recent positions come from the side buffer, the others from the main cache; padding is 0.
        """
        batch = self.decode_batch()
        longest = int(batch.context_tokens.max())
        k, v = (
            pages.unflatten(0, (self.rows, self.pages)).transpose(1, 2).flatten(2, 3)[:, :, :longest]
            for pages in self.cache.main.read(0, batch.page_table.flatten())
        )
        if self.kv.protected_tokens:
            positions = torch.arange(longest, device=k.device).expand(self.rows, -1)
            entries = side_entries(positions, self.tokens[:, None] - self.kv.recent_tokens, self.kv)[:, None, :, None]
            side_k, side_v = self.cache.side.read(0, batch.slots)
            index = entries.clamp(min=0).expand_as(k)
            k = torch.where(entries >= 0, side_k.gather(2, index), k)
            v = torch.where(entries >= 0, side_v.gather(2, index), v)
        if self.kv.precision != "bf16":
            k = rotate(k)  # the normalised Hadamard matrix is its own inverse
        return self._in_columns(k), self._in_columns(v)

    def select(self, indices: torch.Tensor) -> None:
        """Keep rows `indices` (int64, or a bool mask), in that order, repeats allowed."""
        indices = torch.arange(self.rows, device=self.padding.device)[indices.to(self.padding.device)]
        old, by_row = self.cache, self._by_row(self.cache)
        self.padding = self.padding[indices]
        self.cache = self._make_cache(self.rows, self.pages)
        self._by_row(self.cache).copy_(by_row[:, indices])
        for name in SIDE_FIELDS:
            setattr(self.cache.side, name, getattr(old.side, name)[:, indices])

    def copy_side(self) -> dict[str, torch.Tensor]:
        """The side buffer as it is now, for `rewind`."""
        return {name: getattr(self.cache.side, name).clone() for name in SIDE_FIELDS}

    def rewind(self, columns: int, side: dict[str, torch.Tensor] | None = None) -> None:
        """Go back to `columns`; `side`: the side buffer of that time.

        Main pages need nothing: positions beyond the context are never read. Without `side`, raises `ValueError` if
        the ring has overwritten a position that would be recent again.
        """
        if side is None:
            s, w = self.kv.sink_tokens, self.kv.recent_tokens
            then = (columns - self.padding).clamp(min=0)
            intact = (self.tokens <= s + w) | (then <= s) | (then == self.tokens)
            require(
                self.kv.protected_tokens == 0 or w == 0 or bool(intact.all()), "tokens_to_remove",
                columns - self.columns, f"0: the ring of {w} recent positions has overwritten what {columns} columns "
                "would read (only tokens of the latest call can be removed, after activate_past_recording)",
            )  # fmt: skip
        else:
            for name in SIDE_FIELDS:
                getattr(self.cache.side, name).copy_(side[name])
        self.columns = columns
        self._resize()

    def _in_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, positions, d] -> [rows, kv_heads, columns, d]: each row moved right by its padding."""
        if not bool(self.padding.any()):
            return x
        if x.shape[2] == 0:  # nothing but padding yet
            return x.new_zeros(*x.shape[:2], self.columns, x.shape[3])
        positions = torch.arange(self.columns, device=x.device) - self.padding[:, None]
        index = positions.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
        return torch.where((positions >= 0)[:, None, :, None], x.gather(2, index), 0.0)

    def _make_cache(self, rows: int, pages: int) -> KVCache:
        sizes = {"num_pages": rows * pages, "num_slots": rows}
        return KVCache(self.kv, self.shape, **sizes, device=self.padding.device)

    def _by_row(self, cache: KVCache) -> torch.Tensor:
        """The main cache's bytes as [1, rows, P, kv_heads, chunk bytes]."""
        return cache.main.storage.unflatten(1, (self.rows, -1))

    def _resize(self) -> None:
        """Bring P to what the longest context needs, keeping every page that stays."""
        pages = max(1, pages_for(int(self.tokens.max())))
        if pages == self.pages:
            return
        old, kept = self.cache, min(pages, self.pages)
        self.cache = self._make_cache(self.rows, pages)
        self._by_row(self.cache)[:, :, :kept].copy_(self._by_row(old)[:, :, :kept])
        self.cache.side = old.side
        self.pages = pages
