"""Requests in a poisoned cache, for the tests that need a CUDA device."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from kv4rl.attention.float64 import bf16_peer, oracle
from kv4rl.bench.error import random_like_model
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import KVConfig


@dataclass
class Case:
    cache: KVCache
    batch: DecodeBatch
    q: torch.Tensor

    def decode(self):
        return self.cache.decode(1, self.q, self.batch, return_lse=True)

    def check(self) -> None:
        """Each request's output within 1.5 times the error of BF16 attention on the same dequantised values, or FP32's
        (2 times, where both round P to BF16 and a request's few weights have their luck); log-normalisers to FP32."""
        out, lse = self.decode()
        exact, exact_lse = oracle(self.cache, 1, self.q, self.batch, query="int8")
        peer, _ = bf16_peer(self.cache, 1, self.q, self.batch, query="int8")
        assert out.isfinite().all()
        size, error, allowed = (x.flatten(1).norm(dim=1) for x in (exact, out.double() - exact, peer - exact))
        times = 2.0 if self.cache.kv.precision == "bf16" else 1.5
        assert (error <= times * allowed + 1e-5 * size).all(), (error / size, allowed / size)
        live = self.batch.context_tokens > 0
        torch.testing.assert_close(lse[live].double(), exact_lse[live], rtol=1e-5, atol=1e-4)
        assert out[~live].eq(0).all()
        assert lse[~live].eq(-torch.inf).all()

    def check_replays(self, *lengths: list[int]) -> None:
        """Capture one decode; its replays at each of `lengths` have the eager bits and err as BF16 attention does."""
        batch = self.batch
        static = DecodeBatch(batch.page_table.clone(), batch.context_tokens.clone(), batch.slots.clone())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the case was made on it
        with torch.cuda.stream(stream):
            self.cache.decode(1, self.q, static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = self.cache.decode(1, self.q, static, return_lse=True)
        for each in lengths:
            context = torch.tensor(each, device="cuda")
            static.context_tokens.copy_(context)
            out.fill_(torch.nan)
            graph.replay()
            replayed = out.clone(), lse.clone()
            now = DecodeBatch(static.page_table, context, static.slots)
            exact, exact_lse = oracle(self.cache, 1, self.q, now, query="int8")
            peer, _ = bf16_peer(self.cache, 1, self.q, now, query="int8")
            assert (replayed[0].double() - exact).norm() <= 1.5 * (peer - exact).norm()
            torch.testing.assert_close(replayed[1].double(), exact_lse, rtol=1e-5, atol=1e-4)
            for ours, eager in zip(replayed, self.cache.decode(1, self.q, now, return_lse=True), strict=True):
                assert torch.equal(ours, eager)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def poison(cache: KVCache) -> None:
    """Whatever is not written later must not reach an output: NaN metadata, NaN elements, extreme codes."""
    cache.main.storage.fill_(255)
    cache.side.k_codes.fill_(-127)
    cache.side.v_codes.fill_(127)
    cache.side.k_scale.fill_(torch.nan)
    cache.side.v_scale.fill_(torch.nan)


def build_case(
    kv: KVConfig, lengths, *, group=4, kv_heads=2, d=128, dtype=torch.bfloat16, seed=0, backend="cuda", spread=1.0,
    edit=None,
) -> Case:  # fmt: skip
    """`lengths` requests on shuffled pages and slots, written by `backend` into a poisoned cache of two layers.

    `edit(row, q, k, v)` may change a request's vectors before they are written.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    pages = [pages_for(n) for n in lengths]
    shape = CacheShape(2, group * kv_heads, kv_heads, d, dtype)
    rows = len(lengths)
    cache = KVCache(kv, shape, num_pages=sum(pages) + 3, num_slots=rows + 2, device="cuda", backend=backend)
    poison(cache)
    order = torch.randperm(sum(pages) + 3, generator=generator, device="cuda").tolist()
    table = torch.full((rows, max([*pages, 1])), -1, dtype=torch.int64, device="cuda")
    slots = torch.randperm(rows + 2, generator=generator, device="cuda")[:rows]
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
    q = random_like_model(rows, group * kv_heads, d, generator, dtype)
    for row, n in enumerate(lengths):
        if n == 0:
            continue
        where = TokenSlots.for_chunk(table[row], int(slots[row]), 0, n, kv)
        k, v = (random_like_model(n, kv_heads, d, generator, dtype, spread) for _ in range(2))
        if edit:
            edit(row, q[row], k, v)
        cache.write(1, k, v, where)
    context = torch.tensor(lengths, dtype=torch.int64, device="cuda")
    return Case(cache, DecodeBatch(table, context, slots), q)


@pytest.fixture
def make_case():
    return build_case


@pytest.fixture(scope="session")
def run_two_ranks(tmp_path_factory):
    """Start a worker script on two ranks: what each of them left in its file."""

    def run(worker) -> list:
        out = tmp_path_factory.mktemp("ranks")
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*start, str(worker), str(out)], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-4000:]
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]

    return run
