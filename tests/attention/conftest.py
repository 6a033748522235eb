"""Filled caches to attend over: every byte that was not written is poison, pages are shuffled, chunks are random."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kv4rl.attention.float64 import bf16_peer, oracle
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import KVConfig

sys.path.insert(0, str(Path(__file__).parent))  # for `from cuda_emulator.harness import ...`
LAYER = 1  # of 2, so that a kernel which forgets the layer is noticed


@dataclass
class Case:
    cache: KVCache
    batch: DecodeBatch
    q: torch.Tensor  # [B, query_heads, d]
    k: list[torch.Tensor]  # per request [n, kv_heads, d], the source vectors
    v: list[torch.Tensor]
    layer: int = LAYER

    def decode(self):
        return self.cache.decode(self.layer, self.q, self.batch, return_lse=True)

    def oracle(self, query="int8"):
        return oracle(self.cache, self.layer, self.q, self.batch, query)

    def peer(self, query="int8"):
        return bf16_peer(self.cache, self.layer, self.q, self.batch, query)

    def errors(self, query="int8"):
        """((output, lse) error of the cache's decode, the same of BF16 attention on the dequantised values)."""
        exact, exact_lse = self.oracle(query)
        some = exact_lse.isfinite()
        found = []
        for out, lse in (self.decode(), self.peer(query)):
            found.append(((out - exact).norm() / exact.norm(), (lse - exact_lse)[some].abs().max()))
        return found

    def follows_int8_oracle(self, times):
        """Against float64 with the INT8 query: is the output's error at most `times` that of BF16 attention, and the
        normaliser's (no P in it) at most 5 % of BF16's, or FP32 rounding? False for a NaN."""
        (out, lse), (peer_out, peer_lse) = self.errors("int8")
        rounding = 4 * torch.finfo(torch.float32).eps * self.decode()[1].nan_to_num(neginf=0).abs().max().clamp(min=1)
        return bool(out <= times * peer_out and lse <= torch.maximum(0.05 * peer_lse, rounding))

    def follows_oracle(self, times, grid=2.5):
        """`follows_int8_oracle`, and close to the exact query too: an INT8 grid under the largest channel is coarser
        than BF16, at most `grid` times more (5 for any single query; 2.5 where many queries are taken together)."""
        (out, _), (peer_out, _) = self.errors("exact")
        return self.follows_int8_oracle(times) and bool(out <= (times + grid) * peer_out)


def poison(cache):
    """NaN in every scale, offset and unquantised element, extreme codes elsewhere."""
    cache.main.storage.fill_(0xFF)
    for name in ("k_codes", "v_codes"):
        getattr(cache.side, name).fill_(127)
    for name in ("k_scale", "v_scale"):
        getattr(cache.side, name).fill_(torch.nan)


def write_context(cache, row, slot, k, v, generator, layer=LAYER):
    """One request's vectors, in chunks of random length."""
    start = 0
    while start < len(k):
        stop = min(len(k), start + int(torch.randint(1, 200, (), generator=generator)))
        cache.write(layer, k[start:stop], v[start:stop], TokenSlots.for_chunk(row, slot, start, stop, cache.kv))
        start = stop


@pytest.fixture(scope="session")
def make_case():
    def make(contexts, kv=None, *, group=4, kv_heads=2, head_dim=128, dtype=torch.float32, seed=0, edit=None) -> Case:
        """`edit(k, v)` may change the lists of source vectors before they are written."""
        generator = torch.Generator().manual_seed(seed)
        rand = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
        pages = [pages_for(n) for n in contexts]
        shape = CacheShape(2, group * kv_heads, kv_heads, head_dim, dtype)
        kv = kv or KVConfig()
        cache = KVCache(kv, shape, num_pages=sum(pages) + 3, num_slots=len(contexts) + 2, backend="reference")
        poison(cache)
        k, v = ([rand(n, kv_heads, head_dim) for n in contexts] for _ in range(2))
        if edit:
            edit(k, v)
        shuffled = torch.randperm(sum(pages) + 3, generator=generator)
        slots = torch.randperm(len(contexts) + 2, generator=generator)[: len(contexts)]
        table = torch.full((len(contexts), max(pages, default=0) + 2), -1)
        for row, (mine, slot) in enumerate(zip(shuffled[: sum(pages)].split(pages), slots.tolist(), strict=True)):
            table[row, : pages[row]] = mine
            write_context(cache, table[row], slot, k[row], v[row], generator)
        batch = DecodeBatch(table, torch.tensor(contexts, dtype=torch.int64), slots)
        return Case(cache, batch, rand(len(contexts), group * kv_heads, head_dim), k, v)

    return make


@pytest.fixture(scope="session")
def awkward_vectors():
    """[24, heads, d]: zero, constant, tiny, huge and infinite ones, a NaN, ties, and from the 20th on ordinary ones.

    FP16 numbers saturate at 65504, and codes relative to a saturated number must be clamped. Quotients that lie midway
    between two codes show whether a division rounds as IEEE's does.
    """

    def make(heads: int, d: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        x = torch.randn(24, heads, d, generator=torch.Generator().manual_seed(seed))
        x[0], x[1], x[2], x[3], x[4] = 0.0, 2.5, 1e4 * x[2], 1e-6 * x[3], 100 + 1e-3 * x[4]
        x[5], x[6], x[7], x[8], x[9, :, 3] = 1e5 * x[5], 1e6 * x[6], 1e6, -1e9, 3e37
        x[10], x[11], x[12, :, 5], x[13, :, 6], x[14, :, 1] = torch.inf, -torch.inf, torch.inf, -torch.inf, torch.inf
        x[14, :, 7], x[15, :, 7], x[16], x[17] = -torch.inf, torch.nan, 3e38, 2e38 + 2e37 * x[17].clamp(-3, 3)
        x[18] = torch.tensor(0.1).half() * (torch.arange(d) % 15 + 0.5)
        x[18, :, 0], x[18, :, 1] = 0.0, 15 * torch.tensor(0.1).half()
        return x.to(dtype)

    return make


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The CUDA kernels on the CPU (cuda_emulator/harness.py)."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    from cuda_emulator.harness import Emulated

    return Emulated(tmp_path_factory.mktemp("cuda"))
