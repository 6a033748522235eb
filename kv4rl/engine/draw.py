"""The last act of a step: one token a row from its logits, on the device and without asking the host (§A.1).

Rows are told apart by tensors alone (`DrawKeys`), so that one captured graph serves any batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kv4rl.engine.sampler import NoiseKeys, Sampling, sample
from kv4rl.engine.sharded_sampler import ShardedSampler
from kv4rl.model.decoder import Decoder
from kv4rl.model.tensor_parallel import ShardedDecoder

# (logits, noise, sampling) -> (tokens, logp): `sampler.sample`, or its tensor-parallel form
Sampler = Callable[[torch.Tensor, NoiseKeys, Sampling], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class DrawKeys:
    """What a row's token depends on beside its logits; int64 [B] each."""

    noise: torch.Tensor  # `noise_key` of the response
    positions: torch.Tensor  # of the token to sample, in the request
    ends: torch.Tensor  # prompt plus forced response length; `page_table.NEVER`


@dataclass(frozen=True)
class ForcedEnd:
    """The end-of-sequence tokens of forced lengths: kept out of the choice before the end, given at it."""

    token: int  # the one that a response ends with
    columns: torch.Tensor  # int64 [E]: where end-of-sequence tokens stand in the logits (of this shard)

    @classmethod
    def of(cls, eos_token_ids: Sequence[int], decoder: Decoder) -> "ForcedEnd":
        """For the vocabulary, or the part of it, that a decoder samples from."""
        first, count = getattr(decoder, "first_token", 0), decoder.head_weight.shape[0]
        columns = [token - first for token in eos_token_ids if first <= token < first + count]
        return cls(eos_token_ids[0], torch.tensor(columns, dtype=torch.int64, device=decoder.device))


def sampler_of(decoder: Decoder) -> Sampler:
    """How tokens are drawn from a decoder's `sampling_logits`: by this process, or together with the other ranks."""
    if isinstance(decoder, ShardedDecoder):
        return ShardedSampler(decoder.communicator, decoder.first_token)
    return sample


def draw(
    logits: torch.Tensor,
    keys: DrawKeys,
    sampling: Sampling,
    *,
    forced: ForcedEnd | None = None,
    sampler: Sampler = sample,
) -> torch.Tensor:
    """Tokens and their natural-log probabilities as float64 [2, B], exact for both, so that one copy fetches them.

    `logits` FP32 [B, V]; written to. With `forced`, a response ends exactly at `keys.ends`; its last token has
    log-probability 0, as nothing else could come.
    """
    if forced is not None:
        logits.index_fill_(1, forced.columns, float("-inf"))
    tokens, logp = sampler(logits, NoiseKeys(keys.noise, keys.positions), sampling)
    if forced is not None:
        ending = keys.positions + 1 >= keys.ends
        tokens = torch.where(ending, forced.token, tokens)
        logp = torch.where(ending & logp.isfinite(), 0.0, logp)
    return torch.stack((tokens.double(), logp.double()))
