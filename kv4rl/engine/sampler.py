"""From logits to one token per row and the log-probability it was sampled with (design decision 6)."""

from dataclasses import dataclass

import torch

from kv4rl.config import RolloutConfig, require, require_integer, require_number
from kv4rl.engine.block_cdf import locate, masses_of
from kv4rl.engine.noise import uniforms

COLDEST, HOTTEST = 1e-4, 100.0  # logits divided by less overflow; by more, all that is left is noise


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Training uses temperature 1 without truncation (§A.1); the rest is for evaluation."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    seed: int = 43  # run seed of the noise
    max_response_tokens: int | None = None  # None: the engine's own limit

    def __post_init__(self):
        require_number(self.temperature, "temperature", 0, HOTTEST)
        sharp = self.temperature == 0 or self.temperature >= COLDEST
        require(sharp, "temperature", self.temperature, f"0 (greedy), or at least {COLDEST:g}")
        require_number(self.top_p, "top_p", 0, 1, open_low=True)
        require_integer(self.top_k, "top_k", 0)
        require_integer(self.seed, "seed", 0)
        if self.max_response_tokens is not None:
            require_integer(self.max_response_tokens, "max_response_tokens", 0)

    @classmethod
    def of(cls, config: RolloutConfig) -> "Sampling":
        """The sampling a rollout configuration asks for."""
        return cls(config.temperature, config.top_p, config.top_k, config.seed, config.max_response_tokens)


@dataclass(frozen=True)
class NoiseKeys:
    """Which uniform each row draws: `keys` int64 [B] from `noise_key`, `positions` int64 [B] of the sampled tokens."""

    keys: torch.Tensor
    positions: torch.Tensor


def sample(logits: torch.Tensor, noise: NoiseKeys, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens int64 [B] from `logits` FP32 [B, V]; also their natural-log probabilities FP32 [B].

    Inverse CDF of one keyed uniform a row, so that a row's token is the same alone and in any batch. The
    log-probability is that of the distribution sampled from, temperature and truncation included; greedy decoding,
    whose own distribution is a point, records the plain softmax's. NaN or +inf in a row makes its result NaN: the
    engine, which knows the names, raises. On CUDA the sums are taken by blocks (`sample_by_blocks`).
    """
    require(logits.dtype == torch.float32, "logits.dtype", logits.dtype, "torch.float32")
    if logits.is_cuda:
        return sample_by_blocks(logits, noise, sampling)
    if sampling.temperature == 0:
        logp = torch.log_softmax(logits, dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        logp = torch.log_softmax(_truncate(logits / sampling.temperature, sampling), dim=-1)
        cdf = torch.cumsum(logp.exp(), dim=-1, dtype=torch.float64)
        target = uniforms(noise.keys, noise.positions) * cdf[:, -1]
        # right=True: the first token whose cumulative mass exceeds the target, never one of no mass.
        tokens = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # a NaN row finds none
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


def sample_by_blocks(logits: torch.Tensor, noise: NoiseKeys, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sample`, up to rounding: the row is read twice and no probability is written (`engine/block_cdf.py`)."""
    scaled = logits if sampling.temperature in (0, 1) else logits / sampling.temperature
    if sampling.temperature > 0:
        scaled = _truncate(scaled, sampling)
    top = scaled.amax(dim=-1)
    masses = masses_of(scaled, top)
    total = masses.sum(-1)
    if sampling.temperature == 0:
        tokens = scaled.argmax(dim=-1)
    else:
        tokens = locate(scaled, top, masses, uniforms(noise.keys, noise.positions) * total)
    logit = scaled.gather(-1, tokens[:, None])[:, 0]
    return tokens, (logit.double() - top - total.log()).float()


def _truncate(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Keep the `top_k` most likely tokens, then the fewest of them whose mass reaches `top_p`; the rest get -inf."""
    keep = logits.shape[-1] if sampling.top_k == 0 else min(sampling.top_k, logits.shape[-1])
    if keep == logits.shape[-1] and sampling.top_p == 1:
        return logits
    ordered, index = torch.topk(logits, keep, dim=-1)  # sorted, most likely first
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(-1) - probabilities  # mass of the more likely ones
    ordered = ordered.masked_fill(before >= sampling.top_p, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter(-1, index, ordered)
