"""How many pages a memory budget buys: floor(M_q / b_q) after the side buffer is set aside (§A.2 "Phase memory")."""

from collections.abc import Mapping
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


@dataclass(frozen=True)
class HBMPlan:
    """One GPU's memory, item by item in the order they are set aside (§A.2 "Phase memory management")."""

    budget_bytes: int
    items: dict[str, int]  # name -> bytes: what was reserved, then "side buffer" and "pages"
    cache: MemoryPlan

    @property
    def nbytes(self) -> int:
        return sum(self.items.values())

    def __str__(self) -> str:
        parts = [f"{name} {_gigabytes(size)}" for name, size in self.items.items()]
        return f"{_gigabytes(self.budget_bytes)}: {', '.join(parts)} ({self.cache.pages} pages)"


def plan_hbm(
    kv: KVConfig, shape: CacheShape, *, budget_bytes: int, num_slots: int, reserved: Mapping[str, int]
) -> HBMPlan:
    """Divide a stated budget: `reserved` items (model, workspace, metadata) in order, the side buffer, then pages.

    Raises `ValueError` that names each item with its bytes and by how much the budget falls short of it.
    """
    require(num_slots >= 1, "num_slots", num_slots, "an integer >= 1")
    fixed = {**reserved, "side buffer": side_bytes(kv, shape, num_slots)}
    wanted = {**fixed, "one page": page_bytes(kv, shape)}
    if sum(wanted.values()) > budget_bytes:
        left, lines = budget_bytes, []
        for name, size in wanted.items():
            short = size - max(left, 0)
            lines.append(f"{name} {_gigabytes(size)}" + (f" (short by {_gigabytes(short)})" if short > 0 else ""))
            left -= size
        least = sum(wanted.values())
        require(False, "budget_bytes", budget_bytes, f"at least {least} for {kv.precision}: {', '.join(lines)}")
    left = budget_bytes - sum(fixed.values()) + fixed["side buffer"]
    cache = plan_memory(kv, shape, budget_bytes=left, num_slots=num_slots)
    return HBMPlan(budget_bytes, {**fixed, "pages": cache.pages * cache.page_bytes}, cache)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
