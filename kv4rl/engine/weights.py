"""New weights into the engine's own copy: every name and shape checked, every parameter written exactly once."""

from collections.abc import Iterable, Mapping

import torch

from kv4rl.config import require
from kv4rl.model.decoder import Decoder


def check_weights(decoder: Decoder, named_tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` unless the names and shapes are the whole model's, all of them; nothing is written."""
    parameters = dict(decoder.named_parameters())
    for name, tensor in named_tensors.items():
        _check_one(name, tensor, decoder, parameters)
    _check_complete(parameters, set(named_tensors))


@torch.no_grad()
def copy_weights(decoder: Decoder, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy each tensor (a shard: its part of it) into the parameter of its name, in place, in the engine's dtype.

    A tied head is one parameter under one name, so it is written once too. Raises `ValueError` for an unknown or
    repeated name, another shape or a missing tensor; what was written before that stays written.
    """
    parameters, written = dict(decoder.named_parameters()), set()
    for name, tensor in named_tensors:
        _check_one(name, tensor, decoder, parameters)
        require(name not in written, "weight", name, "each weight once; this one came twice")
        parameters[name].copy_(decoder.shard_of(name, tensor))
        written.add(name)
    _check_complete(parameters, written)


def _check_one(name: str, tensor: torch.Tensor, decoder: Decoder, parameters: Mapping[str, torch.Tensor]) -> None:
    require(name in parameters, "weight", name, f"one of the decoder's {len(parameters)} parameter names")
    want = decoder.whole_shape(name)
    require(tuple(tensor.shape) == want, f"{name}.shape", tuple(tensor.shape), f"{want}")


def _check_complete(parameters: Mapping[str, torch.Tensor], names: set[str]) -> None:
    missing = sorted(set(parameters) - names)
    require(
        not missing, "missing weights", missing[:4], f"all {len(parameters)} parameters; {len(missing)} are missing"
    )
