"""An engine's cache memory, given back between collections at addresses that stay (§A.2 "Phase memory management").

Captured graphs read the cache where it lay when they were captured. torch-memory-saver (extra `gpu`) backs the cache
with virtual memory: its pages can go and come back while the addresses stay. Without it, or on a CPU, nothing is given
back, and a sentence says so once.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count

import torch

from kv4rl.attention.backends import explain
from kv4rl.cache.kv_cache import KVCache

_numbers = count()
_kept: set[tuple] = set()


def gives_back(device: torch.device | str) -> bool:
    """Whether an engine on this device can give its cache's memory back and keep the addresses."""
    return torch.device(device).type == "cuda" and _memory_saver() is not None


class CacheMemory:
    """Where one engine's cache is allocated. What it held is lost when it is given back; it comes back zeroed."""

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._saver = _memory_saver() if gives_back(device) else None
        self._tag = f"kv4rl-cache-{next(_numbers)}"
        self._away = False

    @property
    def away(self) -> bool:
        """Is the memory given back? Nothing may read or write the cache then."""
        return self._away

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Tensors made within the block belong to the memory that `release` gives back."""
        if self._saver is None:
            yield
            return
        with torch.cuda.device(self._device), self._saver.region(tag=self._tag):
            yield
        _keep_pools(self._saver)

    def release(self, cache: KVCache) -> int:
        """Give the cache's memory back; bytes that this frees. RuntimeError while pages are held (miles #1335)."""
        used = cache.allocator.num_pages - cache.allocator.num_free
        if used:
            raise RuntimeError(
                f"{used} cache pages are still held by requests: pause the engine before its memory goes"
            )
        if self._away or self._saver is None:
            return 0
        torch.cuda.synchronize(self._device)
        self._saver.pause(self._tag)
        self._away = True
        return cache.nbytes

    def restore(self, cache: KVCache) -> None:
        """Back the cache with memory again, zeroed: stale bytes could read as NaN, and 0 x NaN is NaN."""
        if not self._away:
            return
        self._saver.resume(self._tag)
        self._away = False
        for tensor in cache.tensors:
            tensor.zero_()
        torch.cuda.synchronize(self._device)


def _keep_pools(saver) -> None:
    """Never destroy torch-memory-saver's pools: a free outside its regions, as at exit, ends the process."""
    for key, pool in saver._impl._mem_pools.items():
        if key not in _kept:
            _kept.add(key)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


@cache
def _memory_saver():
    """torch-memory-saver's singleton, hooked into torch's own pools (no LD_PRELOAD); None, explained, without it."""
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError:
        explain("the engine's cache stays allocated while the learner works: torch-memory-saver is not installed")
        return None
    saver.hook_mode = "torch"  # accepted before its first region only, hence the cached function
    return saver
