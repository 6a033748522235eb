"""CPU memory beside a GPU: pinned, made once and reused, for learner states that leave the GPU or are being saved."""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from kv4rl.attention.backends import explain

SLAB = 1 << 30  # bytes: tensors of any size share slabs
ALIGNMENT = 64
TOUCHED = 1 << 26  # bytes of a slab that one thread makes present at a time
THREADS = 8


class HostMemory:
    """Named copies of tensors. `pinned` where a device copies to and from it."""

    def __init__(self, *, pinned: bool):
        self._pinned = pinned
        self._slabs: list[torch.Tensor] = []  # page-locked: kept as long as this object
        self._slab: torch.Tensor | None = None
        self._left = 0  # bytes of the newest slab that nobody has
        self._total = 0
        self._held: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """All that has been allocated."""
        return self._total

    def holds(self, name: str, size: int) -> bool:
        return name in self._held and len(self._held[name]) == size

    def room(self, name: str, size: int) -> torch.Tensor:
        """uint8 [size]: the memory of a name, the same one each time as long as its size stays."""
        if not self.holds(name, size):
            self._held[name] = self._take(size)
        return self._held[name]

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in the memory of `name`; from a device complete after `wait`."""
        copied = self.room(name, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Until copies in either direction are complete."""
        if self._pinned:
            torch.cuda.synchronize()

    def _take(self, size: int) -> torch.Tensor:
        if size > self._left:
            self._left = max(-(-size // ALIGNMENT) * ALIGNMENT, min(SLAB, self._total))  # small models, small slabs
            self._slab = self._new_slab(self._left)
            self._total += self._left
        start = len(self._slab) - self._left
        self._left = max(0, self._left - -(-size // ALIGNMENT) * ALIGNMENT)
        return self._slab[start : start + size]

    def _new_slab(self, size: int) -> torch.Tensor:
        slab = torch.empty(size, dtype=torch.uint8)
        if not self._pinned:
            return slab
        _touch(slab)
        runtime, address = torch.cuda.cudart(), slab.data_ptr()
        error = int(runtime.cudaHostRegister(address, size, 0))
        if error:
            explain(f"host memory is pinned more slowly: cudaHostRegister answers {error}")
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        # Runs before the slabs go, for they are this object's; at exit the process gives everything back.
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False
        self._slabs.append(slab)
        return slab


def _touch(slab: torch.Tensor) -> None:
    """Make a slab's pages present, by several threads: one alone, as in a plain pinned allocation, needs 0.3 s a GB."""
    with ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0)))) as pool:
        for part in [pool.submit(part.zero_) for part in slab.split(TOUCHED)]:
            part.result()
