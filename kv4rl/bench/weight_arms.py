"""Quantised linear layers for the replay's W8A8 and W4A16 arms: what PyTorch itself offers (§B.4).

- W8A8: `torch._scaled_mm`, E4M3 weights with a scale a row, activations quantised per token in the timed forward.
- W4A16: `torch.ops.aten._weight_int4pack_mm` (tinygemm), groups of 128. The paper's Machete is not in our dependencies.

The head stays in BF16, as in the paper's engine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from kv4rl.config import require
from kv4rl.model.decoder import Decoder

E4M3_LARGEST = 448.0
INT4_GROUP, INNER_TILES = 128, 8

Product = Callable[[Tensor], Tensor]  # x [N, in] -> [N, out]


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes of x [N, in] and a scale a row, float32 [N, 1]."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / E4M3_LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


@cache
def _compiled_rows() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """One kernel in place of five: uncompiled they would take longer than the product saves."""
    return torch.compile(quantise_rows, dynamic=True)


def scaled_product(weight: Tensor) -> Product:
    """x @ weight.T with both in E4M3, one scale a token and one an output row; weight [out, in] BF16."""
    codes, scale = quantise_rows(weight)
    column_scale = scale.t().contiguous()

    quantise = _compiled_rows() if weight.is_cuda else quantise_rows

    def product(x: Tensor) -> Tensor:
        quantised, row_scale = quantise(x)
        return torch._scaled_mm(quantised, codes.t(), row_scale, column_scale, out_dtype=x.dtype)

    return product


def int4_product(weight: Tensor) -> Product:
    """x @ weight.T with affine 4-bit weights, scale and midpoint per group of 128 inputs; weight [out, in] BF16."""
    out, inputs = weight.shape
    require(inputs % INT4_GROUP == 0, "inputs of a layer", inputs, f"a multiple of {INT4_GROUP}")
    groups = weight.float().view(out, -1, INT4_GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).view(out, inputs)
    # The operator wants value = scale (code - 8) + zero; two codes a byte, the even one in the high half.
    meta = torch.stack((scale[..., 0], low[..., 0] + 8 * scale[..., 0]), dim=-1)
    meta = meta.transpose(0, 1).contiguous().to(weight.dtype)
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(packed, INNER_TILES)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, INT4_GROUP, meta)


PRODUCTS = {"w8a8": scaled_product, "w4a16": int4_product}
KERNELS = {  # arm -> what multiplies, for a reader
    "w8a8": "torch._scaled_mm, E4M3, a scale a row",
    "w4a16": f"torch's tinygemm, aten::_weight_int4pack_mm, groups of {INT4_GROUP}",
}


class QuantisedProjections:
    """In place of a `FusedLinear`: one quantised product, split as that is."""

    current = True

    def __init__(self, fused, make: Callable[[Tensor], Product]):
        require(fused.bias is None, "bias", True, "a model without projection biases for weight-quantised arms")
        self._product, self._sizes = make(fused.weight), fused.sizes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._product(x).split(self._sizes, dim=-1)


class QuantisedOutput(nn.Module):
    """In place of `o_proj` or `down_proj`: a quantised product, summed over the ranks where there are several."""

    def __init__(self, layer: nn.Linear, make: Callable[[Tensor], Product]):
        super().__init__()
        self._product = make(layer.weight.detach())
        self._communicator = getattr(layer, "communicator", None)

    def forward(self, x: Tensor) -> Tensor:
        partial = self._product(x)
        if self._communicator is None:
            return partial
        out = self._communicator.out(partial.shape, partial.dtype, partial.device)
        return self._communicator.all_reduce(out.copy_(partial))


@contextmanager
def quantised_weights(decoder: Decoder, arm: str) -> Iterator[None]:
    """Within the block the decoder's layers multiply as `arm` ("w8a8", "w4a16") says; afterwards as before."""
    make, kept = PRODUCTS[arm], []
    decoder.fuse_projections()
    for layer in decoder.model.layers:
        for block, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            kept.append((block, name, block.fused, getattr(block, name)))
            block.fused = QuantisedProjections(block.fused, make)
            setattr(block, name, QuantisedOutput(getattr(block, name), make))
    try:
        yield
    finally:
        for block, name, fused, output in kept:
            block.fused = fused
            setattr(block, name, output)
