"""CPU memory beside a GPU: pinned, made once and reused, for learner states that leave the GPU or are being saved."""

import torch

SLAB = 1 << 30  # bytes: pinned memory comes in powers of two, so tensors of odd sizes share slabs
ALIGNMENT = 64


class HostMemory:
    """Named copies of tensors. `pinned` where a device copies to and from it."""

    def __init__(self, *, pinned: bool):
        self._pinned = pinned
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
            least = 1 << max(size - 1, 1).bit_length()
            self._left = max(least, min(SLAB, self._total))  # small models need no large slab
            self._slab = torch.empty(self._left, dtype=torch.uint8, pin_memory=self._pinned)
            self._total += self._left
        start = len(self._slab) - self._left
        self._left = max(0, self._left - -(-size // ALIGNMENT) * ALIGNMENT)
        return self._slab[start : start + size]
