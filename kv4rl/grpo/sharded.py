"""FP32 master weights sharded over a device mesh (FSDP2): the learner's weights when several ranks train (§A.1)."""

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from kv4rl.config import require
from kv4rl.grpo.host_memory import HostMemory
from kv4rl.grpo.masters import require_float32, require_same_names_and_shapes
from kv4rl.grpo.offload import Movable


def shard(decoder: torch.nn.Module, dtype: torch.dtype, mesh: DeviceMesh) -> torch.nn.Module:
    """Shard every layer, and the rest, over a one-dimensional mesh, in place; returns the decoder.

    Parameters stay shards in their dtype; they are gathered in `dtype` for compute and their gradients reduced in FP32.
    Raises ValueError for another mesh.
    """
    require(mesh.ndim == 1, "mesh", mesh, "one dimension, over which the learner is sharded")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    given = {"mesh": mesh, "mp_policy": policy}
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
        """Whole tensors in the compute dtype, under the checkpoint's names: one layer's at a time, each good until the
        next is asked for."""
        layers = [(f"model.layers.{index}.", layer) for index, layer in enumerate(self.decoder.model.layers)]
        for prefix, module in (("", self.decoder), *layers):
            module.unshard()
            try:
                for name, parameter in module.named_parameters():
                    if prefix or not name.startswith("model.layers."):
                        yield prefix + name, parameter.detach()
            finally:
                module.reshard()

    def state(self, host: HostMemory | None) -> dict[str, torch.Tensor]:
        """Copies of the whole masters, FP32, in `host`; empty without it: that rank only takes part."""
        return _gathered(dict(self.decoder.named_parameters()), host, "master.{}")

    def load_state(self, weights: dict[str, torch.Tensor]) -> None:
        """Set the masters from whole tensors. Raises ValueError where a name or a shape is not the decoder's."""
        masters: dict[str, DTensor] = dict(self.decoder.named_parameters())
        require_same_names_and_shapes(weights, masters)
        with torch.no_grad():
            for name, master in masters.items():
                whole = weights[name].to(master.device_mesh.device_type)
                master.copy_(distribute_tensor(whole, master.device_mesh, master.placements))

    def movables(self) -> Iterator[Movable]:
        """This rank's shards, which may leave the GPU between updates."""
        for name, master in self.decoder.named_parameters():
            yield Movable(f"master.{name}", master)

    def optimizer_state(self, optimizer: torch.optim.Optimizer, host: HostMemory | None) -> dict:
        """The state that the optimizer of unsharded masters would have; `host` as in `state`."""
        state = optimizer.state_dict()
        return {**state, "state": {n: _gathered(entry, host, f"{{}}.{n}") for n, entry in state["state"].items()}}

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


def _gathered(values: dict, host: HostMemory | None, naming: str) -> dict:
    """Shards made whole, one at a time, and copied to `host`; empty on a rank without it."""
    kept = {}
    for name, value in values.items():
        value = value.detach().full_tensor() if isinstance(value, DTensor) else value
        if host is not None:
            kept[name] = host.copy(naming.format(name), value) if isinstance(value, torch.Tensor) else value
    return kept


def reshard(decoder: torch.nn.Module) -> None:
    """Give up what a forward pass without a backward left whole: embedding, final norm and head."""
    if isinstance(decoder, FSDPModule):
        decoder.reshard()


def _share(value, parameter: DTensor):
    """Moments have their parameter's shape; a step count is the same everywhere."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    mesh = parameter.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements)
