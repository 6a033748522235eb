"""The processes of one run: a single one, or those that torchrun started, one for each rollout replica."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kv4rl.config import require
from kv4rl.device import choose_device
from kv4rl.grpo.ranks import all_ranks

Item = TypeVar("Item")
PATIENCE = timedelta(minutes=30)  # how long a rank waits for another: a collection interval can differ by minutes


@dataclass(frozen=True)
class Ranks:
    """This process among the others; `mesh` is None for a process alone."""

    device: torch.device
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def leads(self) -> bool:
        """Does this rank write what the run leaves behind?"""
        return self.rank == 0

    def gather(self, value: Item) -> list[Item]:
        """Every rank's value, in the order of ranks, on all of them."""
        return all_ranks([value], self.mesh)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's part of what all ranks hold."""
        return list(items[self.rank :: self.size])


@contextmanager
def connect(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun's environment describes, each on its own GPU; without one, a process alone.

    `device` as in `choose_device`; with several ranks "auto" or "cpu". Raises ValueError for another, and for fewer
    GPUs than processes on this node.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Ranks(choose_device(device))
        return
    require(device in ("auto", "cpu"), "device", device, "auto or cpu under torchrun, which places the ranks")
    chosen = choose_device(device)
    if chosen.type == "cuda":
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        require(local < count, "processes on this node", f"more than {local}", f"at most {count}, one for each GPU")
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        mesh = init_device_mesh(chosen.type, (dist.get_world_size(),))
        yield Ranks(chosen, dist.get_rank(), mesh if mesh.size() > 1 else None)
    finally:
        dist.destroy_process_group()
