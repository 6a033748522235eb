"""The processes of one run: a single one, or those that torchrun started, one for each rollout replica."""

import os
import sys
import traceback
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
from kv4rl.model.communicator import Communicator, PeerLost, init_mesh, make_communicator

Item = TypeVar("Item")
PATIENCE = timedelta(minutes=30)  # a rank for another replica's: a collection interval can differ by minutes


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

    def replica(self, tensor_parallel: int) -> "Replica":
        """The rollout replica of `tensor_parallel` consecutive ranks that this one is part of; a collective.

        Raises ValueError unless the ranks make whole replicas.
        """
        whole = self.size % tensor_parallel == 0
        start = f"`torchrun --nproc-per-node {tensor_parallel} -m ...` in place of `python -m ...` starts one replica"
        expected = f"a divisor of {self.size}, the number of ranks; {start}"
        require(whole, "tensor_parallel", tensor_parallel, expected)
        number, count, communicator = self.rank // tensor_parallel, self.size // tensor_parallel, None
        if tensor_parallel > 1:
            communicator = make_communicator(init_mesh(tensor_parallel, self.device.type))
        return Replica(number, count, self.rank % tensor_parallel == 0, communicator)


@dataclass(frozen=True)
class Replica:
    """One rollout engine among `count`: a rank's own, or shared by the ranks of a tensor-parallel group."""

    number: int
    count: int
    leads: bool  # does this rank speak for the replica? The others repeat its steps
    communicator: Communicator | None

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This replica's part of what all replicas hold."""
        return list(items[self.number :: self.count])


@contextmanager
def leaving_lost_peers() -> Iterator[None]:
    """End this process at once where a peer is lost: an orderly end would wait for the kernel that never ends.

    torchrun then ends the other ranks.
    """
    try:
        yield
    except PeerLost:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


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
        with leaving_lost_peers():
            yield Ranks(chosen, dist.get_rank(), mesh if mesh.size() > 1 else None)
    finally:
        dist.destroy_process_group()


@contextmanager
def tensor_parallel(size: int, device_type: str) -> Iterator[Replica]:
    """One replica over all the `size` processes that torchrun started; for size 1 this process alone.

    Raises `ValueError` as `init_mesh` does.
    """
    if size == 1:
        yield Replica(0, 1, True, None)
        return
    try:
        communicator = make_communicator(init_mesh(size, device_type))
        with leaving_lost_peers():
            yield Replica(0, 1, communicator.rank == 0, communicator)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
