"""Sums and gathers among the ranks of one tensor-parallel group, behind one pair of methods.

On a CPU gloo moves the data. On CUDA small sums go through torch's symmetric memory, two-shot and without multicast,
inside the captured graph; large ones, and all where symmetric memory is not to be had, through NCCL.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from kv4rl.attention.backends import explain
from kv4rl.config import require

TIMEOUT_S = 45  # a rank that waits this long for a peer of its group ends with an error
POLL_S = 2e-5
SYMMETRIC_BYTES = 16 << 20  # larger sums (prefill) go through NCCL
BUFFERS = 2  # used in turn, so that a product may be written while a peer still reads the last sum


def init_mesh(tensor_parallel: int, device_type: str = "cuda") -> DeviceMesh:
    """The mesh (dp, tp) over all processes that torchrun started; joins them if that has not happened yet.

    Raises `ValueError` if there are none, or they do not make whole groups. A sum of a `tp` group waits `TIMEOUT_S` for
    its slowest rank, whatever the processes' own group allows: within a replica ranks go step by step. Sums inside a
    captured step are outside torch's watch: `Communicator.wait` bounds the step instead.
    """
    if not dist.is_initialized():
        expected = f"1, or a multiple of {tensor_parallel} processes started with torchrun"
        require("RANK" in os.environ, "tensor_parallel", tensor_parallel, expected)
        backend, device = "gloo", None
        if device_type == "cuda":
            backend, device = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S), device_id=device)
    world = dist.get_world_size()
    whole = tensor_parallel >= 1 and world % tensor_parallel == 0
    require(whole, "tensor_parallel", tensor_parallel, f"a divisor of the {world} processes started")
    shape = (world // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "tp"))
    _set_pg_timeout(timedelta(seconds=TIMEOUT_S), mesh.get_group("tp"))  # init_device_mesh takes none
    return mesh


class PeerLost(RuntimeError):
    """A step that needs every rank of its group did not end in time; the message names the rank that waited."""


class Communicator:
    """One rank of a tensor-parallel group. Every rank makes the same calls in the same order."""

    nbytes = 0  # of device memory that the communicator itself holds

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def out(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where to write what `all_reduce` shall sum."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; the result may be overwritten by the second call after this one."""
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank, [size, *x.shape], by rank."""
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.group)
        return gathered.view(self.size, *x.shape)

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event behind a step of ours. Raises `PeerLost` after `TIMEOUT_S`.

        A kernel that waits for a rank that has died, or hangs, never ends, and no timeout of torch's covers it.
        """
        end = monotonic() + TIMEOUT_S
        while not event.query():
            if monotonic() > end:
                peers = [rank for rank in range(self.size) if rank != self.rank]
                raise PeerLost(
                    f"rank {self.rank} of a tensor-parallel group waited {TIMEOUT_S:g} s for its step: one of the "
                    f"ranks {peers} of the group has died or hangs"
                )
            sleep(POLL_S)


class SymmetricCommunicator(Communicator):
    """Sums in symmetric memory: each rank adds up its share of the buffer over all peers, then fetches the others'."""

    def __init__(self, group: dist.ProcessGroup):
        """Not to be used before `allocate` and then `join` have succeeded on every rank."""
        super().__init__(group)
        self._buffers: list[torch.Tensor] = []
        self._next = 0

    def allocate(self) -> None:
        """Make this rank's buffers. Raises `RuntimeError` where there is no such memory."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory as symmetric

        given = {"dtype": torch.uint8, "device": torch.device("cuda", torch.cuda.current_device())}
        self._buffers = [symmetric.empty(SYMMETRIC_BYTES, **given) for _ in range(BUFFERS)]

    def join(self) -> None:
        """Meet the other ranks, which must do the same. Raises `RuntimeError` where their memory cannot be reached."""
        from torch.distributed import _symmetric_memory as symmetric

        self._handles = [symmetric.rendezvous(buffer, self.group.group_name) for buffer in self._buffers]

    @property
    def nbytes(self) -> int:
        """Device memory of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def out(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > SYMMETRIC_BYTES or size % (16 * self.size) or dtype not in (torch.bfloat16, torch.float32):
            return super().out(shape, dtype, device)
        self._next = (self._next + 1) % BUFFERS
        return self._buffers[self._next][:size].view(dtype).view(tuple(shape))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        ours = any(x.data_ptr() == buffer.data_ptr() for buffer in self._buffers)
        if not ours:
            return super().all_reduce(x)
        return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", self.group.group_name)


def make_communicator(mesh: DeviceMesh) -> Communicator:
    """The communicator of this process's group in the mesh's `tp` dimension."""
    plain = Communicator(mesh.get_group("tp"))
    if mesh.device_type != "cuda" or plain.size == 1:
        return plain
    made = SymmetricCommunicator(plain.group)
    for stage in (made.allocate, made.join):
        reason = failure_of_any(plain, stage, torch.device("cuda", torch.cuda.current_device()))
        if reason is not None:
            explain(f"sums go through NCCL, since symmetric memory is not available: {reason}")
            return plain
    return made


def failure_of_any(communicator: Communicator, attempt: Callable[[], None], device: torch.device) -> str | None:
    """Make an attempt on every rank of the group: None if all succeeded, else a reason, and that on all of them.

    A rank that went another way by itself would leave its peers in a sum that never ends.
    """
    reason = None
    try:
        attempt()
    except RuntimeError as error:
        reason = str(error)
    failures = communicator.all_reduce(torch.tensor([reason is not None], dtype=torch.int32, device=device))
    if failures.item() == 0:
        return None
    return reason or "another rank of the group could not have it"
