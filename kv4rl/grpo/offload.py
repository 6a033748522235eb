"""Learner states in CPU memory while the engine collects (§A.2 "optimizer-only state and the frozen reference").

A tensor's storage is emptied and filled again; the tensor stays the object it was, so optimizer, views and FSDP2's
shards need not know.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.tensor import DTensor

from kv4rl.grpo.host_memory import HostMemory

Kind = Literal["state", "frozen", "derived"]


@dataclass(frozen=True)
class Movable:
    """A tensor that may leave the GPU.

    "state" is copied out each time, "frozen" once, and "derived" never: whoever owns it computes it again.
    """

    name: str
    tensor: torch.Tensor
    kind: Kind = "state"


@dataclass(frozen=True)
class _Away:
    storage: torch.UntypedStorage
    size: int
    device: torch.device
    kept: torch.Tensor | None  # uint8 on the CPU; None: derived


class Offloader:
    """Takes storages off their device and puts them back; `pinned` as in `HostMemory`."""

    def __init__(self, *, pinned: bool):
        self._host = HostMemory(pinned=pinned)
        self._away: list[_Away] = []

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
            if storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            kept = None if movable.kind == "derived" else self._copy_out(movable, storage)
            self._away.append(_Away(storage, storage.nbytes(), local.device, kept))
        self._host.wait()
        for each in self._away:
            each.storage.resize_(0)
        return sum(each.size for each in self._away)

    def restore(self) -> int:
        """Bring everything back to where it was; derived tensors come back with any values. Bytes allocated."""
        for each in self._away:
            each.storage.resize_(each.size)
            if each.kept is not None:
                _bytes(each.storage, each.device).copy_(each.kept, non_blocking=True)
        self._host.wait()
        moved = sum(each.size for each in self._away)
        self._away = []
        return moved

    def _copy_out(self, movable: Movable, storage: torch.UntypedStorage) -> torch.Tensor:
        size = storage.nbytes()
        if movable.kind == "frozen" and self._host.holds(movable.name, size):
            return self._host.room(movable.name, size)
        return self._host.copy(movable.name, _bytes(storage, storage.device))


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """A storage as uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
