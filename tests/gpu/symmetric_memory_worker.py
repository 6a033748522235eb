"""One rank of `test_symmetric_memory.py`: `symmetric_memory_worker.py OUT`, two of them on one GPU, summing by gloo.

NCCL takes no GPU twice; torch's symmetric memory does when it is told so.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from kv4rl.model.communicator import SymmetricCommunicator, make_communicator

SUMS = 20  # more than there are buffers: one still read must not be written


def sums(communicator):
    """The same addends through symmetric memory and through gloo, a pair a sum."""
    made = []
    for turn in range(SUMS):
        generator = torch.Generator(device="cuda").manual_seed(2 * turn + communicator.rank)
        x = torch.randn(64, 256, generator=generator, device="cuda").bfloat16()
        shared = communicator.all_reduce(communicator.out(x.shape, x.dtype, x.device).copy_(x)).clone()
        dist.all_reduce(x, group=communicator.group)
        made.append((shared.cpu(), x.cpu()))
    return made


def without_memory_on_rank_1(mesh):
    """What both ranks fall back to where one has no such memory, and what it sums."""
    allocate = SymmetricCommunicator.allocate

    def fail(self):
        if self.rank == 1:
            raise RuntimeError("rank 1 has no such memory")
        allocate(self)

    SymmetricCommunicator.allocate = fail
    fallen = make_communicator(mesh)
    SymmetricCommunicator.allocate = allocate
    return type(fallen).__name__, fallen.all_reduce(torch.ones(8, device="cuda")).cpu()


def main():
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo")
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "tp"))
    communicator = make_communicator(mesh)
    found = {"kind": type(communicator).__name__, "sums": sums(communicator), "fallen": without_memory_on_rank_1(mesh)}
    torch.save(found, f"{sys.argv[1]}/{communicator.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
