"""Projections of one input as one matrix product: QKV, and gate with up (§A.2 "Model execution")."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedLinear:
    """Some `nn.Linear` layers over one buffer: rows of it are their weights, one product computes them all.

    The layers' parameters keep their names, shapes and identity and become views of the buffer, so checkpoints and
    weight syncs see what they saw before, and a sync that writes every parameter once writes the buffer once. Where
    somebody gives a layer another tensor (a cast, a move, an assignment) `current` says so, and the layers are to be
    used one by one until they are fused again. A copy of a model is not fused.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        self._layers = tuple(layers)
        self.sizes = [layer.out_features for layer in layers]
        with torch.no_grad():
            self.weight = torch.cat([layer.weight for layer in layers])
            biased = layers[0].bias is not None
            self.bias = torch.cat([layer.bias for layer in layers]) if biased else None
        for layer, weight in zip(layers, self.weight.split(self.sizes), strict=True):
            layer.weight.data = weight
        if biased:
            for layer, bias in zip(layers, self.bias.split(self.sizes), strict=True):
                layer.bias.data = bias
        self._addresses = self._addresses_now()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the layers for x [N, in]: views [N, out_i] of one product, not differentiable in the weights."""
        return F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)

    @property
    def current(self) -> bool:
        """Whether the layers' parameters still are this buffer."""
        return self._addresses == self._addresses_now()

    def _addresses_now(self) -> tuple[int, ...]:
        tensors = [t for layer in self._layers for t in (layer.weight, layer.bias) if t is not None]
        return tuple(tensor.data_ptr() for tensor in tensors)

    def __deepcopy__(self, memo: dict) -> None:
        """A copied model has parameters of its own; it starts unfused."""
        return None


def project(x: Tensor, layers: Sequence[nn.Linear], fused: FusedLinear | None) -> tuple[Tensor, ...]:
    """x through each of `layers`: by the fused product where no gradient is wanted, else one by one."""
    if fused is not None and not torch.is_grad_enabled() and fused.current:
        return fused(x)
    return tuple(layer(x) for layer in layers)
