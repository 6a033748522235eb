"""BF16 instead of INT8 for the protected positions: the comparison of Fig. A3b,d, for the replay only.

The same sink and recent positions as KV4-RL's stand in a pool of BF16 pages, a ring per request. INT4 pages are read
over the rest, by the kernel without a protected path; `decode_bf16` reads the pool; Eq. A1 merges the two. This is a
separate launch, with a write and a merge of its own, and not part of the INT4 launch as the INT8 path is: its cost
contains that.
"""

import torch

from kv4rl.attention.backends import Backend, OneLaunch
from kv4rl.cache.batch import DecodeBatch, TokenSlots, side_entries
from kv4rl.cache.kv_cache import KVCache
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import PAGE_TOKENS, KVConfig, require


class Bf16Protected:
    """Backend of a `kv4` cache that keeps the positions which `kv` protects in BF16 as well, and reads them there."""

    def __init__(self, cache: KVCache, kv: KVConfig):
        require(cache.kv.precision == "kv4", "precision", cache.kv.precision, "kv4: INT4 pages of all positions")
        sink = kv.sink_tokens
        require(sink % PAGE_TOKENS == 0, "sink_tokens", sink, f"whole pages of {PAGE_TOKENS}: INT4 is read behind them")
        self.kv, self._main = kv, cache.backend
        self.name = cache.backend.name
        self._pages = pages_for(kv.protected_tokens)  # of a slot
        self.pool = KVCache(
            KVConfig("bf16"), cache.shape, num_pages=cache.num_slots * self._pages, num_slots=cache.num_slots,
            device=cache.device, backend=cache.backend.name,
        )  # fmt: skip
        self._merge = torch.compile(merged, dynamic=True) if cache.device.type == "cuda" else merged
        self._step: tuple | None = None  # (batch, where, its parts): the layers of a step share one batch

    def write(self, cache, layer, k, v, where):
        """Both representations of new tokens, as `Backend.write`."""
        self._main.write(cache, layer, k, v, where)
        self.pool.backend.write(self.pool, layer, k, v, self._pool_slots(where))

    def decode(self, cache, layer, q, batch, return_lse=False):
        rest, protected, _ = self._parts(batch, None)
        return self._finish(
            self._main.decode(cache, layer, q, rest, True),
            self.pool.backend.decode(self.pool, layer, q, protected, True),
            return_lse,
        )

    def takes_raw(self, cache) -> bool:
        return hasattr(self._main, "takes_raw") and self._main.takes_raw(cache) and self.pool.takes_raw

    def write_and_decode(self, cache, layer, q, k, v, where, batch, return_lse=False, **before):
        """`write`, then `decode`, with a launch less of each kernel where the backends can."""
        rest, protected, ring = self._parts(batch, where)
        return self._finish(
            _write_and_decode(self._main, cache, layer, q, k, v, where, rest, **before),
            _write_and_decode(self.pool.backend, self.pool, layer, q, k, v, ring, protected, **before),
            return_lse,
        )

    def _finish(self, rest, protected, return_lse):
        out, lse = self._merge(*rest, *protected)
        return (out, lse) if return_lse else out

    def _parts(self, batch: DecodeBatch, where: TokenSlots | None) -> tuple:
        """The batch without its protected positions, the batch of these alone, and where new tokens go among them."""
        if self._step is not None and self._step[0] is batch and self._step[1] is where:
            return self._step[2]
        first, protected = self.kv.sink_tokens // PAGE_TOKENS, self.kv.protected_tokens
        context = batch.context_tokens
        table = batch.slots[:, None] * self._pages + torch.arange(self._pages, device=context.device)
        rest = DecodeBatch(batch.page_table[:, first:], (context - protected).clamp(min=0), batch.slots)
        ring = DecodeBatch(table, context.clamp(max=protected), batch.slots)
        for part in (rest, ring):
            part.trust()
        parts = (rest, ring, None if where is None else self._pool_slots(where))
        self._step = (batch, where, parts)
        return parts

    def _pool_slots(self, where: TokenSlots) -> TokenSlots:
        """Where tokens stand among the protected ones: the order of the side buffer, in pages."""
        entries = side_entries(where.positions, 0, self.kv)
        pages = where.slots * self._pages + entries // PAGE_TOKENS
        kept = (where.page_ids >= 0) & (entries >= 0)
        nowhere = torch.full_like(entries, -1)
        slots = TokenSlots(
            torch.where(kept, pages, -1), entries % PAGE_TOKENS, where.positions, where.slots, nowhere
        )  # fmt: skip
        slots.trust()
        return slots


def _write_and_decode(backend: Backend, cache: KVCache, layer: int, q, k, v, where, batch, **before):
    if isinstance(backend, OneLaunch):
        return backend.write_and_decode(cache, layer, q, k, v, where, batch, True, **before)
    backend.write(cache, layer, k, v, where)
    return backend.decode(cache, layer, q, batch, True)


def merged(o_a, z_a, o_b, z_b):
    """`attention.merge.merge_state` of outputs in the model's dtype: one kernel where compiled, FP32 within."""
    z = torch.logaddexp(z_a, z_b)
    a, b = (torch.where(part == -torch.inf, 0.0, torch.exp(part - z))[..., None] for part in (z_a, z_b))
    return (a * o_a.float() + b * o_b.float()).to(o_a.dtype), z
