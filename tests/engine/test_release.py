"""Giving an engine's cache memory back: refused while requests run, and no step without it."""

import pytest
import torch

from kv4rl.cache.kv_cache import CacheShape, KVCache
from kv4rl.config import KVConfig
from kv4rl.engine.release import CacheMemory, gives_back


class VirtualMemory:
    """Stands in for torch-memory-saver: what it is asked, in order."""

    def __init__(self):
        self.calls = []

    def pause(self, tag):
        self.calls.append("pause")

    def resume(self, tag):
        self.calls.append("resume")


@pytest.fixture
def cache():
    shape = CacheShape(num_layers=2, query_heads=2, kv_heads=1, head_dim=64, dtype=torch.float32)
    return KVCache(KVConfig("kv4rl", sink_tokens=2, recent_tokens=4), shape, num_pages=3, num_slots=2)


@pytest.fixture
def elastic(monkeypatch):
    """A memory whose virtual addresses are pretended."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    memory = CacheMemory("cpu")
    memory._saver = VirtualMemory()
    return memory


def test_memory_returns_zeroed_since_stale_bytes_could_be_nan(cache, elastic):
    """Bug rows 10 and 11: the second interval after a wake read garbage; 0 x NaN is NaN."""
    for _ in range(2):
        assert elastic.release(cache) == cache.nbytes and elastic.away
        for tensor in (cache.main.storage, cache.side.k_codes, cache.side.v_scale):
            tensor.view(torch.uint8).fill_(255)
        elastic.restore(cache)
        assert not elastic.away
        assert not cache.main.storage.any() and not cache.side.k_codes.any() and not cache.side.v_scale.any()
    assert elastic._saver.calls == ["pause", "resume"] * 2


def test_twice_is_once(cache, elastic):
    elastic.release(cache)
    assert elastic.release(cache) == 0
    elastic.restore(cache)
    elastic.restore(cache)
    assert elastic._saver.calls == ["pause", "resume"]


def test_memory_does_not_go_while_a_request_holds_pages(cache, elastic):
    """miles #1335: memory released while requests still ran."""
    pages = cache.allocator.allocate(2)
    with pytest.raises(RuntimeError, match="2 cache pages are still held"):
        elastic.release(cache)
    cache.allocator.free(pages)
    elastic.release(cache)


def test_a_cpu_gives_nothing_back(cache):
    memory = CacheMemory("cpu")
    with memory.allocating():
        pass
    assert not gives_back("cpu") and memory.release(cache) == 0 and not memory.away
    memory.restore(cache)
