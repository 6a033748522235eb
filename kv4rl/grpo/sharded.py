"""FP32 master weights sharded over a device mesh (FSDP2): the learner's weights when several ranks train (§A.1)."""

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from kv4rl.config import require
from kv4rl.grpo.masters import require_float32, require_same_names_and_shapes


def shard(decoder: torch.nn.Module, dtype: torch.dtype, mesh: DeviceMesh, *, offload: bool = False) -> torch.nn.Module:
    """Shard every layer, and the rest, over a one-dimensional mesh, in place; returns the decoder.

    Parameters stay FP32 shards; they are gathered in `dtype` for compute and their gradients reduced in FP32.
    `offload` keeps the shards in CPU memory between uses (the frozen reference). Raises ValueError for another mesh.
    """
    require(mesh.ndim == 1, "mesh", mesh, "one dimension, over which the learner is sharded")
    policy = CPUOffloadPolicy() if offload and mesh.device_type != "cpu" else OffloadPolicy()
    given = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": policy,
    }
    for layer in decoder.model.layers:
        fully_shard(layer, **given)
    return fully_shard(decoder, **given)


class ShardedWeights:
    """`MasterWeights` over a mesh: the same methods, every one a collective that all ranks call together."""

    def __init__(self, decoder: torch.nn.Module, dtype: torch.dtype, mesh: DeviceMesh):
        require_float32(decoder)
        self._dtype = dtype
        self.decoder = shard(decoder.requires_grad_(True), dtype, mesh)

    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's FP32 shards, in the decoder's order."""
        return list(self.decoder.parameters())

    def named_compute_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One whole tensor after the other in the compute dtype, under the checkpoint's names; never all at once."""
        for name, parameter in self.decoder.named_parameters():
            yield name, parameter.detach().to(self._dtype).full_tensor()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the whole masters, FP32 on CPU."""
        return {name: p.detach().full_tensor().to("cpu", copy=True) for name, p in self.decoder.named_parameters()}

    def load_state(self, weights: dict[str, torch.Tensor]) -> None:
        """Set the masters from whole tensors. Raises ValueError where a name or a shape is not the decoder's."""
        masters: dict[str, DTensor] = dict(self.decoder.named_parameters())
        require_same_names_and_shapes(weights, masters)
        with torch.no_grad():
            for name, master in masters.items():
                whole = weights[name].to(master.device_mesh.device_type)
                master.copy_(distribute_tensor(whole, master.device_mesh, master.placements))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict:
        """The state that the optimizer of unsharded masters would have, on the CPU."""
        state = optimizer.state_dict()
        gathered = {
            number: {name: _whole(value) for name, value in entry.items()} for number, entry in state["state"].items()
        }
        return {**state, "state": gathered}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict) -> None:
        """Continue from `optimizer_state`, whatever the number of ranks it was saved by."""
        parameters = self.parameters()
        mine = {
            number: {name: _share(value, parameters[number]) for name, value in entry.items()}
            for number, entry in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": mine})

    def refresh(self) -> None:
        """Nothing to do: the next forward gathers the masters as they are."""


def _whole(value):
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _share(value, parameter: DTensor):
    """Moments have their parameter's shape; a step count is the same everywhere."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements)
