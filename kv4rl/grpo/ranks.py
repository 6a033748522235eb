"""What ranks tell one another about an update: sums of its statistics, and lists of what each has."""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from kv4rl.grpo.loss import LossStats

Item = TypeVar("Item")


def sum_over_ranks(stats: LossStats, mesh: DeviceMesh) -> LossStats:
    """Every field summed over the mesh; the same on every rank."""
    names = list(vars(stats))
    values = torch.stack([getattr(stats, name) for name in names])
    dist.all_reduce(values, group=mesh.get_group())
    return LossStats(**dict(zip(names, values, strict=True)))


def all_ranks(items: list[Item], mesh: DeviceMesh | None) -> list[Item]:
    """The items of all ranks, rank after rank, tensors on the CPU; without a mesh the list itself."""
    if mesh is None:
        return items
    mine = [item.cpu() if isinstance(item, torch.Tensor) else item for item in items]
    found: list[list[Item]] = [[] for _ in range(mesh.size())]
    dist.all_gather_object(found, mine, group=mesh.get_group())
    return [item for rank in found for item in rank]
