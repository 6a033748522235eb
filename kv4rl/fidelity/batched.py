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
from torch import Tensor

from kv4rl.attention.merge import merge_state
from kv4rl.attention.reference import prepare_query
from kv4rl.fidelity.corpus import POSITIONS, History
from kv4rl.fidelity.forced import Prefill, prefill
from kv4rl.fidelity.protection import attention_mask, random_mask, region_mask, visible_mask
from kv4rl.fidelity.representation import Representation
from kv4rl.fidelity.row_blocks import RowBlock, padded, row_blocks
from kv4rl.fidelity.stored import MainCopy, SideCopy, grouped_product, softmax_region
from kv4rl.formats.hadamard import rotate
from kv4rl.model.decoder import Decoder


class BatchedAttention:
    """`attend` of a decoder whose rows are the fed response tokens of all histories, one history after another.

    A row is written before it is attended, so it sees itself. `seed` orders the random control.
    """

    def __init__(
        self, representation: Representation, histories: Sequence[History], prompts: Prefill, *, seed: int = 0
    ):
        self.representation, self.prompts = representation, prompts
        self.by_attention = representation.protection.select == "attention" and representation.protection.count > 0
        self.prompt_bounds = [0, *accumulate(len(h.prompt) for h in histories)]
        self.row_bounds = [0, *accumulate(len(h.response) - 1 for h in histories)]
        device = prompts.last_hidden.device
        self.contexts = [len(h.prompt) + torch.arange(1, len(h.response), device=device) for h in histories]
        self.blocks = [
            [] if self.by_attention else row_blocks(contexts, self._fixed_mask(contexts, seed + i))
            for i, contexts in enumerate(self.contexts)
        ]

    def _fixed_mask(self, contexts: Tensor, seed: int) -> Tensor | None:
        """Protected positions, the same in every layer: bool [R, columns], or None for none."""
        protection, columns = self.representation.protection, int(contexts[-1])
        if protection.positions == 0:
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
            outputs.append(self._attend(layer, i, q[first:last], keys.contiguous(), values.contiguous()))
        return torch.cat(outputs).to(q.dtype)

    def _attend(self, layer: int, history: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One history: q [R, query_heads, d], keys and values [kv_heads, columns, d] -> [R, query_heads, d]."""
        exact, coded = self._queries(q, keys.shape[0])
        main = MainCopy(self.representation, padded(keys), padded(values))
        blocks = self._blocks_by_attention(layer, history, coded, main) if self.by_attention else self.blocks[history]
        protected = any(block.side_columns is not None for block in blocks)
        side = SideCopy(self.representation, keys, values) if protected else None
        outputs = [self._attend_block(block, exact, coded, main, side) for block in blocks]
        return torch.cat(outputs, 2).flatten(0, 1).transpose(0, 1)

    def _attend_block(self, block: RowBlock, exact, coded, main: MainCopy, side: SideCopy | None) -> Tensor:
        """Some rows of one history: [kv_heads, group, rows, d]."""
        scores = main.scores(coded[:, :, block.rows], block.columns)
        out, z = softmax_region(scores, block.main_bias, main.product)
        if block.side_columns is None:
            return out
        q = (exact if side.exact_query else coded)[:, :, block.rows]
        side_scores, product = side.of(q, block.side_columns)
        out, _ = merge_state(out, z, *softmax_region(side_scores, block.side_bias, product))
        return out

    def _queries(self, q: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
        """q as it is and as the main path has it, both [kv_heads, group, R, d], not rotated."""
        exact = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).contiguous()
        if self.representation.arithmetic == "storage":
            return exact, exact
        codes = prepare_query(q, kv_heads)
        coded = rotate(codes.codes * codes.scale.unsqueeze(-1))  # back from the basis it was rounded in
        return exact, coded.permute(1, 2, 0, 3).contiguous()

    def _blocks_by_attention(self, layer: int, history: int, coded: Tensor, main: MainCopy) -> list[RowBlock]:
        """Blocks that protect what the main path's own scores have attended to most, by KV head."""
        contexts = self.contexts[history]
        columns = int(contexts[-1])
        scores = grouped_product(coded, main.keys[..., :columns])
        p = torch.softmax(scores.masked_fill_(~visible_mask(contexts, columns), -torch.inf), -1)
        prompt = slice(self.prompt_bounds[history], self.prompt_bounds[history + 1])
        earlier = self.prompts.attention[layer][:, prompt]
        return row_blocks(contexts, attention_mask(self.representation.protection, p, earlier, contexts))


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
