"""`sampler.sample` where each rank of a tensor-parallel group holds the logits of some tokens.

The ranks exchange a peak, a mass and a candidate a row, and all of them end up with the same token and the same
log-probability, bit for bit: what they add up is the same everywhere, in the same order.
"""

import torch

from kv4rl.engine.block_cdf import locate, masses_of
from kv4rl.engine.noise import uniforms
from kv4rl.engine.sampler import NoiseKeys, Sampling, sample
from kv4rl.model.communicator import Communicator


class ShardedSampler:
    """A `Sampler` over the tokens [first_token, first_token + n) of each rank; n is the same on all of them."""

    def __init__(self, communicator: Communicator, first_token: int):
        self._communicator, self._first = communicator, first_token

    def __call__(self, logits: torch.Tensor, noise: NoiseKeys, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [B] and natural-log probabilities FP32 [B] from this rank's logits FP32 [B, n].

        The distribution and its noise are those of `sample`; only sums are taken in another order. Truncated
        sampling (evaluation) gathers the logits.
        """
        if sampling.temperature > 0 and (sampling.top_k or sampling.top_p < 1):
            gathered = self._communicator.all_gather(logits)
            return sample(gathered.transpose(0, 1).flatten(1), noise, sampling)
        scaled = logits / sampling.temperature if sampling.temperature not in (0, 1) else logits
        peak, best = scaled.max(dim=-1)
        peaks = self._communicator.all_gather(peak)
        top = peaks.amax(0)
        masses = masses_of(scaled, top)
        own = masses.sum(-1)
        ends = self._communicator.all_gather(own).cumsum(0)
        if sampling.temperature == 0:
            owner, pick = peaks.argmax(0), best  # the first of equals, as argmax over the whole row has it
        else:
            target = uniforms(noise.keys, noise.positions) * ends[-1]
            owner = (ends <= target).sum(0).clamp(max=len(ends) - 1)
            rank = self._communicator.rank
            # Only the owner's pick counts; rounding must not push its target past its own mass.
            within = torch.minimum(target - ends[rank - 1] if rank else target, torch.nextafter(own, own.new_zeros(())))
            pick = locate(scaled, top, masses, within)
        candidates = torch.stack(((pick + self._first).double(), scaled.gather(-1, pick[:, None])[:, 0].double()))
        token, logit = self._communicator.all_gather(candidates).gather(0, owner.expand(1, 2, -1))[0]
        return token.long(), (logit - top - ends[-1].log()).float()
