"""How many pages a memory budget buys: floor(M_q / b_q) after the side buffer is set aside (§A.2 "Phase memory")."""

from dataclasses import dataclass

from kv4rl.cache.kv_cache import CacheShape
from kv4rl.config import PAGE_TOKENS, KVConfig, require
from kv4rl.formats.packing import chunk_bytes

SCALE_BYTES = 2  # FP16, one a side entry and head, for K and for V


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of a `KVCache` in bytes; `pages * page_bytes + side_bytes` is its `nbytes`."""

    pages: int
    page_bytes: int  # b_q: one 16-token page over all layers and KV heads of the shard
    side_bytes: int  # of all request slots: bounded, it does not grow with the context

    @property
    def tokens(self) -> int:
        """Positions that the pages hold."""
        return self.pages * PAGE_TOKENS

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes + self.side_bytes


def page_bytes(kv: KVConfig, shape: CacheShape) -> int:
    """b_q of §A.2: bytes of one page over all layers and KV heads."""
    return shape.num_layers * shape.kv_heads * chunk_bytes(kv.precision, shape.head_dim, shape.dtype)


def side_bytes(kv: KVConfig, shape: CacheShape, num_slots: int) -> int:
    """Bytes of the side buffer: INT8 K and V of s + w entries a slot, with their scales; 0 unless `kv4rl`."""
    entry = 2 * (shape.head_dim + SCALE_BYTES)
    return num_slots * kv.protected_tokens * shape.num_layers * shape.kv_heads * entry


def plan_memory(kv: KVConfig, shape: CacheShape, *, budget_bytes: int, num_slots: int) -> MemoryPlan:
    """Pages for `num_slots` request slots within `budget_bytes` (M_q: what weights and workspaces leave).

    Raises `ValueError`, with the bytes needed, if the budget does not hold the side buffer and one page.
    """
    require(num_slots >= 1, "num_slots", num_slots, "an integer >= 1")
    page, side = page_bytes(kv, shape), side_bytes(kv, shape, num_slots)
    needed = f"at least {side + page} (side buffer of {num_slots} slots {side}, one page {page})"
    require(budget_bytes >= side + page, "budget_bytes", budget_bytes, needed)
    return MemoryPlan(pages=(budget_bytes - side) // page, page_bytes=page, side_bytes=side)
