"""A decoder split over the ranks of a tensor-parallel group: heads, MLP columns and vocabulary (§B.1: TP2).

Query and KV heads go in contiguous runs, so that a KV head stays with its query heads; each rank's cache holds its own
KV heads only. QKV, gate and up are split by output (no communication), `o_proj` and `down_proj` by input: their partial
outputs are summed, two sums a layer. Embedding and head are split by vocabulary: one more sum a step, and sampling
exchanges a few numbers a row instead of logits (`engine/sharded_sampler.py`).
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv4rl.config import require
from kv4rl.model.communicator import Communicator
from kv4rl.model.config import DecoderConfig
from kv4rl.model.decoder import Decoder

BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_INPUT = ("o_proj", "down_proj")


def split_dimension(name: str) -> int | None:
    """The dimension along which a parameter is split; None if every rank holds all of it."""
    *_, module, kind = name.split(".")
    if module in BY_OUTPUT:
        return 0
    return 1 if module in BY_INPUT and kind == "weight" else None


def shard_config(config: DecoderConfig, size: int) -> DecoderConfig:
    """What one of `size` ranks computes: its heads and MLP columns; the vocabulary is still the whole one's.

    Raises `ValueError`, naming both numbers, unless `size` divides KV heads, MLP and vocabulary.
    """
    for name in ("kv_heads", "intermediate_size", "vocab_size"):
        whole = getattr(config, name)
        require(whole % size == 0, "tensor_parallel", size, f"a divisor of the model's {name}, {whole}")
    return replace(
        config,
        query_heads=config.query_heads // size,
        kv_heads=config.kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


class RowParallelLinear(nn.Linear):
    """A linear layer of which each rank holds some inputs: partial products, summed; the bias is added once."""

    communicator: Communicator

    def forward(self, x: Tensor) -> Tensor:
        out = self.communicator.out((x.shape[0], self.out_features), x.dtype, x.device)
        out = self.communicator.all_reduce(torch.mm(x, self.weight.t(), out=out))
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """Rows [first, first + n) of the vocabulary; other tokens are zero here and come with the sum."""

    communicator: Communicator

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.communicator.rank * self.num_embeddings
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        out = self.communicator.out(found.shape, found.dtype, found.device)
        out.copy_(found.masked_fill_(elsewhere[:, None], 0))
        return self.communicator.all_reduce(out).clone()  # the residual stream outlives the buffer


class ShardedDecoder(Decoder):
    """One rank's part of a decoder, for inference. Parameter names are the whole model's, shapes the shard's.

    `config` has this rank's heads and MLP columns. `logits` are the whole vocabulary's, on every rank;
    `sampling_logits` only this rank's part, for samplers that know how to share.
    """

    def __init__(self, config: DecoderConfig, communicator: Communicator):
        super().__init__(shard_config(config, communicator.size))
        self.communicator = communicator
        vocabulary = config.vocab_size // communicator.size
        self.first_token = communicator.rank * vocabulary
        self.model.embed_tokens = VocabParallelEmbedding(vocabulary, config.hidden_size)
        self.model.embed_tokens.communicator = communicator
        if not config.tied_head:
            self.lm_head = nn.Linear(config.hidden_size, vocabulary, bias=False)
        for layer in self.model.layers:
            for block, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
                whole = getattr(block, name)
                row = RowParallelLinear(whole.in_features, whole.out_features, bias=whole.bias is not None)
                row.communicator = communicator
                setattr(block, name, row)

    def logits(self, hidden: Tensor) -> Tensor:
        gathered = self.communicator.all_gather(self.sampling_logits(hidden))
        return gathered.transpose(0, 1).flatten(1)

    def sampling_logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [N, vocab / ranks] of this rank's tokens, from `first_token` on."""
        return super().logits(hidden)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        shape, split = list(self.get_parameter(name).shape), split_dimension(name)
        if split is not None:
            shape[split] *= self.communicator.size
        return tuple(shape)

    def shard_of(self, name: str, tensor: Tensor) -> Tensor:
        split = split_dimension(name)
        return tensor if split is None else tensor.chunk(self.communicator.size, split)[self.communicator.rank]


def empty_shard(config: DecoderConfig, communicator: Communicator, *, dtype: torch.dtype, device) -> ShardedDecoder:
    """A shard whose weights are yet to be written."""
    with torch.device("meta"):
        shard = ShardedDecoder(config, communicator).to(dtype)
    return shard.to_empty(device=device)


@torch.no_grad()
def shard_decoder(decoder: Decoder, communicator: Communicator, *, device=None) -> ShardedDecoder:
    """This rank's part of a whole decoder, in its dtype, on `device` (default: the decoder's)."""
    shard = empty_shard(decoder.config, communicator, dtype=decoder.dtype, device=device or decoder.device)
    for name, parameter in decoder.named_parameters():
        shard.get_parameter(name).copy_(shard.shard_of(name, parameter))
    return shard
