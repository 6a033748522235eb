"""Learner states in CPU memory while the engine collects (§A.2 "optimizer-only state and the frozen reference").

A tensor's storage is emptied and filled again; the tensor stays the object it was, so optimizer, views and FSDP2's
shards need not know. Host copies are pinned and made once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.tensor import DTensor

SLAB = 1 << 29  # bytes: pinned memory is handed out in powers of two, so odd sizes share slabs

Kind = Literal["state", "frozen", "derived"]


@dataclass(frozen=True)
class Movable:
    """A tensor that may leave the GPU.

    "state" is copied out each time, "frozen" once, and "derived" never: whoever owns it computes it again.
    """

    name: str
    tensor: torch.Tensor
    kind: Kind = "state"


class Offloader:
    """Takes storages off their device and puts them back; `pinned` host memory where a device reads it."""

    def __init__(self, *, pinned: bool):
        self._pinned = pinned
        self._slabs: list[torch.Tensor] = []
        self._left = 0  # bytes of the last slab that are not handed out
        self._host: dict[str, list[torch.Tensor]] = {}  # pieces, uint8, of what a name held
        self._away: list[tuple[torch.UntypedStorage, int, list[torch.Tensor] | None, torch.device]] = []

    @property
    def away(self) -> bool:
        return bool(self._away)

    def offload(self, movables: Iterable[Movable]) -> int:
        """Copy out what must survive, then free all storages; bytes freed. RuntimeError if something is away."""
        if self._away:
            raise RuntimeError("offloaded twice: restore first")
        seen = set()
        for movable in movables:
            local = movable.tensor.to_local() if isinstance(movable.tensor, DTensor) else movable.tensor
            if not local.untyped_storage().resizable():  # a mapped file's, for one
                local.data = local.data.clone()
            storage = local.untyped_storage()
            size = storage.nbytes()
            if size == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            pieces = None if movable.kind == "derived" else self._copy_out(movable, storage)
            self._away.append((storage, size, pieces, local.device))
        self._wait()
        for storage, *_ in self._away:
            storage.resize_(0)
        return sum(size for _, size, *_ in self._away)

    def restore(self) -> int:
        """Bring everything back to where it was; derived tensors come back with any values. Bytes allocated."""
        for storage, size, pieces, device in self._away:
            storage.resize_(size)
            for piece, part in zip(pieces or (), _parts(storage, device, pieces or ()), strict=True):
                part.copy_(piece, non_blocking=True)
        self._wait()
        moved = sum(size for _, size, *_ in self._away)
        self._away = []
        return moved

    def _copy_out(self, movable: Movable, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        size = storage.nbytes()
        known = self._host.get(movable.name)
        fits = known is not None and sum(map(len, known)) == size
        if not fits:
            known = self._host[movable.name] = self._take(size)
        if not (fits and movable.kind == "frozen"):
            for piece, part in zip(known, _parts(storage, storage.device, known), strict=True):
                piece.copy_(part, non_blocking=True)
        return known

    def _take(self, size: int) -> list[torch.Tensor]:
        """Host memory of `size` bytes, in pieces."""
        pieces = []
        while size:
            if self._left == 0:
                # A small need takes a small slab.
                self._left = SLAB if self._slabs or size >= SLAB else 1 << (size - 1).bit_length()
                self._slabs.append(torch.empty(self._left, dtype=torch.uint8, pin_memory=self._pinned))
            slab, take = self._slabs[-1], min(size, self._left)
            start = len(slab) - self._left
            pieces.append(slab[start : start + take])
            self._left -= take
            size -= take
        return pieces

    def _wait(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()


def _parts(storage: torch.UntypedStorage, device: torch.device, like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A storage as uint8 views of the lengths of `like`."""
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
    return list(whole.split([len(piece) for piece in like])) if like else []
