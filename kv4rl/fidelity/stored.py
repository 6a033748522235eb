"""Both copies of a history's keys and values as an arm stores them, and attention over a region of either.

Everything is [kv_heads, group, rows, …] for queries and [kv_heads, columns, d] for keys and values, in FP32 and in the
original basis: rotating a stored key back and the query with it leaves their product (Eq. 3.4).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kv4rl.config import require
from kv4rl.fidelity.representation import Representation
from kv4rl.fidelity.row_blocks import TILE
from kv4rl.formats.affine import AffineCodes
from kv4rl.formats.probe import FORMATS
from kv4rl.formats.symmetric import SymmetricCodes

Product = Callable[[Tensor], Tensor]  # p [kv_heads, group, rows, columns] -> p @ v


class MainCopy:
    """What the main cache holds of every position (§5.1)."""

    def __init__(self, representation: Representation, k: Tensor, v: Tensor):
        key_form, value_form = representation.formats
        stored = k if key_form is None else key_form.reconstruct(k, rotated="k" in representation.rotated)
        self.keys = stored.float().transpose(-1, -2) * k.shape[-1] ** -0.5
        self.operand = None
        if value_form is None:
            self.v = v.float()
        elif representation.arithmetic == "storage":
            self.v = value_form.reconstruct(v, rotated="v" in representation.rotated)
        else:
            self._keep_codes(value_form.quantize(v), representation)

    def _keep_codes(self, stored: AffineCodes | SymmetricCodes, representation: Representation) -> None:
        affine = isinstance(stored, AffineCodes)
        single = stored.scale.shape[-1] == 1 if affine else isinstance(stored, SymmetricCodes)
        require(single, "values", representation.values, "one INT scale a vector: the decode path has no other")
        self.operand = representation.probability_operand if affine else "fp16"
        self.v = stored.codes.float()
        self.scale = (stored.scale.squeeze(-1) if affine else stored.scale).float()
        self.offset = stored.offset.float() if affine else None  # [kv_heads, columns, 1]

    def scores(self, q: Tensor, columns: int) -> Tensor:
        """q · k / sqrt(d) of the first `columns` keys."""
        return grouped_product(q, self.keys[..., :columns])

    def product(self, p: Tensor) -> Tensor:
        """p @ v as the arithmetic has it, over the first p.shape[-1] values, a whole number of tiles."""
        columns = p.shape[-1]
        if self.operand is None:
            return grouped_product(p, self.v[:, :columns])
        weights = rounded_weights(p * self.scale[:, None, None, :columns], self.operand)
        out = grouped_product(weights, self.v[:, :columns])
        return out if self.offset is None else out.add_(grouped_product(p, self.offset[:, :columns]))


class SideCopy:
    """The better copies that protected positions are read from (§5.2); in BF16 they come with the exact query."""

    def __init__(self, representation: Representation, k: Tensor, v: Tensor):
        self.exact_query = representation.protection.form == "bf16"
        if self.exact_query:
            self.k, self.v = k.bfloat16().float(), v.bfloat16().float()
        else:
            self.k, self.v = FORMATS["int8"].reconstruct(k, rotated=True), FORMATS["int8"].reconstruct(v)
        self.deployed = representation.arithmetic == "deployed"
        if self.deployed:
            self.v = self.v.bfloat16().float()

    def of(self, q: Tensor, columns: Tensor) -> tuple[Tensor, Product]:
        """(scores, product) over `columns`, int64."""
        k, v = self.k[:, columns], self.v[:, columns]
        if self.exact_query:
            q = q.bfloat16().float()
        scores = grouped_product(q, k.transpose(-1, -2) * k.shape[-1] ** -0.5)
        return scores, lambda p: grouped_product(p.bfloat16().float() if self.deployed else p, v)


def softmax_region(scores: Tensor, bias: Tensor, product: Product) -> tuple[Tensor, Tensor]:
    """(output, natural log-normaliser) where `bias` is 0 and not -inf; works in place on `scores`."""
    scores = scores.add_(bias)
    top = scores.amax(-1, keepdim=True)
    p = scores.sub_(torch.where(top == -torch.inf, 0.0, top)).exp_()
    total = p.sum(-1, keepdim=True)
    out = torch.where(total == 0, 0.0, product(p) / total)
    return out, (top + total.log()).squeeze(-1)


def rounded_weights(weights: Tensor, operand: str) -> Tensor:
    """p·scale_v [..., whole tiles] as the P operand holds it: one scale a query and tile (`attention/reference.py`)."""
    tiles = weights.unflatten(-1, (-1, TILE))
    scale = tiles.amax(-1, keepdim=True)
    relative = tiles.div_(torch.where(scale == 0, 1.0, scale))
    if operand == "u8":
        return relative.mul_(255).round_().mul_(scale / 255).flatten(-2)
    return relative.half().float().mul_(scale).flatten(-2)


def grouped_product(p: Tensor, v: Tensor) -> Tensor:
    """[kv_heads, group, rows, n] @ [kv_heads, n, m], the group's rows as one matrix."""
    return (p.flatten(1, 2) @ v).unflatten(1, p.shape[1:3])
