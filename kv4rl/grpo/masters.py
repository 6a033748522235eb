"""FP32 master weights beside the decoder that computes ("BF16 compute, FP32 master weights", Table A1)."""

import copy
from collections.abc import Iterator, Mapping

import torch

from kv4rl.config import require
from kv4rl.grpo.host_memory import HostMemory
from kv4rl.grpo.offload import Movable


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `GRPOConfig.compute_dtype` means on a device: "auto" is bfloat16 on CUDA, float32 on CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def cast_copy(decoder: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy with its parameters in `dtype`. Buffers keep theirs: they may hold positions' frequencies."""
    twin = copy.deepcopy(decoder)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.grad = None
    return twin


def require_float32(decoder: torch.nn.Module) -> None:
    """Raise ValueError, naming the parameter, unless all of them can be master weights."""
    for name, parameter in decoder.named_parameters():
        require(parameter.dtype == torch.float32, f"dtype of {name}", parameter.dtype, "float32 master weights")


def require_same_names_and_shapes(weights: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError where a name or a shape of `weights` is not the masters'."""
    names = sorted(weights.keys() ^ masters.keys())
    require(not names, "weights", names, "the decoder's parameter names, each once")
    for name, master in masters.items():
        shape, given = tuple(master.shape), tuple(weights[name].shape)
        require(given == shape, f"shape of {name}", given, f"{shape}")


def copied_state(state: Mapping[int, Mapping], host: HostMemory) -> dict:
    """An optimizer's "state" with its tensors copied to `host`."""
    copy = lambda name, value: host.copy(name, value) if isinstance(value, torch.Tensor) else value
    return {n: {name: copy(f"{name}.{n}", value) for name, value in entry.items()} for n, entry in state.items()}


class MasterWeights:
    """FP32 parameters for the optimizer, and `decoder`, which computes with them in the compute dtype.

    In FP32 both are the same tensors. Otherwise `decoder` is a cast copy, whose gradients are added to the masters' in
    FP32 as soon as they exist, so that any number of microbatches accumulates without BF16 rounding.
    """

    def __init__(self, decoder: torch.nn.Module, dtype: torch.dtype):
        require_float32(decoder)
        self._masters = dict(decoder.named_parameters())
        self.decoder = decoder if dtype == torch.float32 else cast_copy(decoder, dtype)
        self.decoder.requires_grad_(True)
        for master in self._masters.values():
            master.requires_grad_(True)
        if self.decoder is not decoder:
            for name, parameter in self.decoder.named_parameters():
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(self._masters[name]))

    def parameters(self) -> list[torch.nn.Parameter]:
        """The FP32 masters, in the decoder's order."""
        return list(self._masters.values())

    def named_compute_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the decoder computes with, under the checkpoint's names; tied heads appear once."""
        for name, parameter in self.decoder.named_parameters():
            yield name, parameter.detach()

    def state(self, host: HostMemory | None) -> dict[str, torch.Tensor]:
        """Copies of the masters, FP32, in `host`; empty without it."""
        return {} if host is None else {name: host.copy(f"master.{name}", p) for name, p in self._masters.items()}

    def load_state(self, weights: dict[str, torch.Tensor]) -> None:
        """Set the masters. Raises ValueError where a name or a shape is not the decoder's."""
        require_same_names_and_shapes(weights, self._masters)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(weights[name])
        self.refresh()

    def movables(self) -> Iterator[Movable]:
        """What may leave the GPU between updates; `refresh` makes the computing decoder's copy again."""
        for name, master in self._masters.items():
            yield Movable(f"master.{name}", master)
        for name, parameter in self.decoder.named_parameters():
            if parameter is not self._masters[name]:
                yield Movable(f"compute.{name}", parameter, "derived")

    def optimizer_state(self, optimizer: torch.optim.Optimizer, host: HostMemory | None) -> dict:
        """The state of the optimizer of these masters, copied to `host`; without tensors if there is none."""
        state = optimizer.state_dict()
        return {**state, "state": {} if host is None else copied_state(state["state"], host)}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict) -> None:
        """Continue from `optimizer_state`."""
        optimizer.load_state_dict(state)

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters into the computing decoder; after every optimizer step."""
        for name, parameter in self.decoder.named_parameters():
            if parameter is not self._masters[name]:
                parameter.copy_(self._masters[name])


def _move_gradient_to(master: torch.nn.Parameter):
    def move(parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return move
