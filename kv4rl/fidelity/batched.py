"""Force an arm along the histories in one pass a layer instead of one step a token (§B.5).

The tokens are given, so a layer's keys and values of all forced tokens are known before its attention: each row
attends over its own prefix under a mask, with the formats, the protection and the arithmetic of a `Representation`.
Layer by layer this is what `forced.py` computes step by step through the engine's cache, to FP32 rounding, at the
price of a matrix product; a test holds the two together. Prompts are prefilled unquantised, as in rollout, and the
arm's own quantised keys and values feed its later hidden states.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kv4rl.attention.live_pages import TILE_PAGES
from kv4rl.attention.merge import merge_state
from kv4rl.attention.reference import prepare_query
from kv4rl.config import PAGE_TOKENS, require
from kv4rl.fidelity.corpus import POSITIONS, History
from kv4rl.fidelity.forced import Prefill, prefill
from kv4rl.fidelity.protection import attention_mask, random_mask, region_mask, visible_mask
from kv4rl.fidelity.representation import Representation
from kv4rl.formats.affine import AffineCodes
from kv4rl.formats.hadamard import rotate
from kv4rl.formats.probe import FORMATS
from kv4rl.formats.symmetric import SymmetricCodes
from kv4rl.model.decoder import Decoder

TILE = TILE_PAGES * PAGE_TOKENS


class _Values:
    """Values of one history, stored: `product(p)` is p @ v as the arithmetic has it."""

    def __init__(self, representation: Representation, v: Tensor):
        """v: [kv_heads, columns, d]."""
        form = representation.formats[1]
        self.operand = None
        if form is None:
            self.v = v.float()
        elif representation.arithmetic == "storage":
            self.v = form.reconstruct(v, rotated="v" in representation.rotated)
        else:
            self._keep_codes(form.quantize(v), representation)

    def _keep_codes(self, stored: AffineCodes | SymmetricCodes, representation: Representation) -> None:
        affine = isinstance(stored, AffineCodes)
        single = stored.scale.shape == (*stored.codes.shape[:-1], 1) if affine else isinstance(stored, SymmetricCodes)
        require(single, "values", representation.values, "one INT scale a vector: the decode path has no other")
        self.operand = representation.probability_operand if affine else "fp16"
        self.v = stored.codes.float()
        self.scale = (stored.scale.squeeze(-1) if affine else stored.scale).float()
        self.offset = stored.offset.squeeze(-1).float() if affine else None

    def product(self, p: Tensor) -> Tensor:
        """p [kv_heads, group, R, columns] -> [kv_heads, group, R, d], not normalised."""
        if self.operand is None:
            return _matmul(p, self.v)
        out = _matmul(rounded_weights(p * self.scale[:, None, None], self.operand), self.v)
        if self.offset is not None:
            out += p @ self.offset[:, None, :, None]
        return out


def rounded_weights(weights: Tensor, operand: str) -> Tensor:
    """p·scale_v [..., columns] as the P operand holds it: one scale a query and tile (`attention/reference.py`)."""
    columns = weights.shape[-1]
    tiles = F.pad(weights, (0, -columns % TILE)).unflatten(-1, (-1, TILE))
    scale = tiles.amax(-1, keepdim=True)
    relative = tiles / torch.where(scale == 0, 1.0, scale)
    if operand == "u8":
        rounded = relative.mul_(255).round_().mul_(scale / 255)
    else:
        rounded = relative.half().float().mul_(scale)
    return rounded.flatten(-2)[..., :columns]


def _matmul(p: Tensor, v: Tensor) -> Tensor:
    """[kv_heads, group, R, columns] @ [kv_heads, columns, d], the group's rows as one matrix."""
    return (p.flatten(1, 2) @ v).unflatten(1, p.shape[1:3])


def _softmax_region(scores: Tensor, mask: Tensor, product) -> tuple[Tensor, Tensor]:
    """(output, log-normaliser) over `mask` [..., R, columns] of scores [kv_heads, group, R, columns]."""
    scores = scores + torch.zeros(mask.shape, device=scores.device).masked_fill_(~mask, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    p = scores.sub_(torch.where(top == -torch.inf, 0.0, top)).exp_()
    total = p.sum(-1, keepdim=True)
    out = torch.where(total == 0, 0.0, product(p) / total)
    return out, (top + total.log()).squeeze(-1)


class BatchedAttention:
    """`attend` of a decoder whose rows are the fed response tokens of all histories, one history after another."""

    def __init__(
        self, representation: Representation, histories: Sequence[History], prompts: Prefill, *, seed: int = 0
    ):
        self.representation, self.prompts = representation, prompts
        self.prompt_bounds = [0, *accumulate(len(h.prompt) for h in histories)]
        self.row_bounds = [0, *accumulate(len(h.response) - 1 for h in histories)]
        device = prompts.last_hidden.device
        self.contexts = [
            len(h.prompt) + torch.arange(1, len(h.response), device=device) for h in histories
        ]  # a row sees itself
        self.masks = [self._fixed_mask(contexts, seed + i) for i, contexts in enumerate(self.contexts)]

    def _fixed_mask(self, contexts: Tensor, seed: int) -> Tensor | None:
        """Protected positions that are the same in every layer, bool [R, columns]; else None."""
        protection, columns = self.representation.protection, int(contexts[-1])
        if protection.positions == 0 or protection.select == "attention":
            return None
        if protection.select == "random":
            return random_mask(protection, contexts, columns, seed=seed)
        return region_mask(protection, contexts, columns)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, query_heads, d]; k, v [N, kv_heads, d] of the fed tokens -> [N, query_heads, d]."""
        outputs = []
        for i, (first, last) in enumerate(pairwise(self.row_bounds)):
            prompt = slice(self.prompt_bounds[i], self.prompt_bounds[i + 1])
            keys = torch.cat((self.prompts.keys[layer][prompt], k[first:last])).transpose(0, 1)
            values = torch.cat((self.prompts.values[layer][prompt], v[first:last])).transpose(0, 1)
            outputs.append(self._attend(layer, i, q[first:last], keys, values))
        return torch.cat(outputs).to(q.dtype)

    def _attend(self, layer: int, history: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One history: q [R, query_heads, d], keys and values [kv_heads, columns, d] -> [R, query_heads, d]."""
        kv_heads, d = keys.shape[0], keys.shape[-1]
        exact, coded = self._queries(q, kv_heads)
        form = self.representation.formats[0]
        stored = keys if form is None else form.reconstruct(keys, rotated="k" in self.representation.rotated)
        scores = _matmul(coded, stored.float().transpose(-1, -2) * d**-0.5)
        visible = visible_mask(self.contexts[history], keys.shape[1])
        protected = self._protected(layer, history, scores, visible)
        main = visible if protected is None else visible & ~protected
        out, z = _softmax_region(scores, main, _Values(self.representation, values).product)
        if protected is not None:
            side = self._attend_protected(exact, coded, keys, values, protected)
            out, z = merge_state(out, z, *side)
        return out.flatten(0, 1).transpose(0, 1)

    def _queries(self, q: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
        """q as it is and as the main path has it, both [kv_heads, group, R, d], not rotated."""
        exact = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        if self.representation.arithmetic == "storage":
            return exact, exact
        codes = prepare_query(q, kv_heads)
        coded = rotate(codes.codes * codes.scale.unsqueeze(-1))  # back from the basis it was rounded in
        return exact, coded.permute(1, 2, 0, 3)

    def _protected(self, layer: int, history: int, scores: Tensor, visible: Tensor) -> Tensor | None:
        protection = self.representation.protection
        if protection.select != "attention" or protection.count == 0:
            return self.masks[history]
        p = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
        bounds = slice(self.prompt_bounds[history], self.prompt_bounds[history + 1])
        earlier = self.prompts.attention[layer][:, bounds]
        return attention_mask(protection, p, earlier, self.contexts[history])

    def _attend_protected(self, exact, coded, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The better copies of `keys` and `values`, over the columns that any row protects."""
        columns = mask.flatten(0, -2).any(0).nonzero()[:, 0]
        k, v, deployed = keys[:, columns], values[:, columns], self.representation.arithmetic == "deployed"
        if self.representation.protection.form == "bf16":
            k, v = k.bfloat16().float(), v.bfloat16().float()
            q = exact.bfloat16().float()
        else:
            form = FORMATS["int8"]
            k, v, q = form.reconstruct(k, rotated=True), form.reconstruct(v), coded
        if deployed:
            v = v.bfloat16().float()

        def product(p: Tensor) -> Tensor:
            return _matmul(p.bfloat16().float() if deployed else p, v)

        scores = _matmul(q, k.transpose(-1, -2) * keys.shape[-1] ** -0.5)
        return _softmax_region(scores, mask[..., columns], product)


@torch.inference_mode()
def batched_logits(
    decoder: Decoder,
    representation: Representation,
    histories: Sequence[History],
    *,
    prompts: Prefill | None = None,
    seed: int = 0,
) -> Tensor:
    """Full-vocabulary logits at the eight states of every history, float32 [histories, 8, vocab], on the CPU.

    `prompts`: the histories' `prefill`, if it is at hand (with attention, for protection by it). `seed` orders the
    random control. Raises ValueError on an empty list of histories.
    """
    if prompts is None:
        prompts = prefill(decoder, histories, with_attention=representation.protection.select == "attention")
    attend = BatchedAttention(representation, histories, prompts, seed=seed)
    ids = torch.tensor([token for h in histories for token in h.response[:-1]], device=decoder.device)
    positions = torch.cat([contexts - 1 for contexts in attend.contexts])
    hidden = decoder(ids, positions, attend)
    rows = [
        hidden[first + position - 1] if position else prompts.last_hidden[i]
        for i, (h, first) in enumerate(zip(histories, attend.row_bounds, strict=False))
        for position in h.positions
    ]
    logits = [decoder.logits(chunk).cpu() for chunk in torch.stack(rows).split(64)]
    return torch.cat(logits).unflatten(0, (len(histories), POSITIONS))
