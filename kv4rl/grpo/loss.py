"""The GRPO loss: clipped surrogate, dual clip, token-level TIS and the k3 reference penalty (§3, Eq. 3.2 and 3.5)."""

from dataclasses import dataclass

import torch

from kv4rl.config import GRPOConfig, require

LOG_RATIO_LIMIT = 20.0  # log-ratios are clamped to ±20 before exp, as verl does
K3_LIMIT = 10.0  # and the k3 estimate to ±10


@dataclass
class LossStats:
    """Sums over tokens (FP64 scalars), so that microbatches and ranks add up to proper token means.

    The fields follow verl's metrics of the same names.
    """

    count: torch.Tensor  # valid tokens
    pg_loss: torch.Tensor  # tis_weight * clipped surrogate
    kl_loss: torch.Tensor  # k3 before its coefficient
    pg_clipfrac: torch.Tensor  # tokens where the ratio clip binds
    pg_clipfrac_lower: torch.Tensor  # tokens where the dual clip binds
    ppo_kl: torch.Tensor  # old_logp - logp
    tis_weight: torch.Tensor  # after the clip at C: what multiplied the loss

    def __add__(self, other: "LossStats") -> "LossStats":
        return LossStats(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})

    def means(self) -> dict[str, float]:
        """Token means of every sum, by field name (empty batch: 0)."""
        count = max(float(self.count), 1.0)
        return {name: float(value) / count for name, value in vars(self).items() if name != "count"}


def tis_weights(old_logp: torch.Tensor, sampler_logp: torch.Tensor, clip: float) -> torch.Tensor:
    """c = min(C, pi_old / q), detached (Eq. 3.5): corrects the sampler that generated the token, not this update."""
    return unclipped_tis_weights(old_logp, sampler_logp).clamp(max=clip)


def unclipped_tis_weights(old_logp: torch.Tensor, sampler_logp: torch.Tensor) -> torch.Tensor:
    """pi_old / q with the log-ratio clamped to ±20, detached; the drift that the clip at C would hide."""
    return (old_logp - sampler_logp).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, config: GRPOConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-S of Eq. 3.2 with the dual clip, and where each clip binds.

    ratio, advantages: [N]. Returns (loss [N], ratio clip binds [N] bool, dual clip binds [N] bool). For A < 0 the loss
    is at most dual_clip * |A|, and its gradient is zero there.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(unclipped, clipped)
    bound = -advantages * config.dual_clip
    dual = (advantages < 0) & (loss > bound)
    return torch.where(dual, bound, loss), clipped > unclipped, dual


def k3_penalty(logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
    """k3 = exp(d) - d - 1, d = log pi_ref - log pi_theta, both clamped as verl does; [N]."""
    d = (reference_logp - logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (d.exp() - d - 1).clamp(-K3_LIMIT, K3_LIMIT)


def grpo_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    sampler_logp: torch.Tensor,
    reference_logp: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    config: GRPOConfig,
    num_tokens: int,
) -> tuple[torch.Tensor, LossStats]:
    """Token-mean GRPO loss of one microbatch (Eq. 3.2, 3.5, §3).

    All tensors: [N], one entry a token; `logp` alone carries gradient. `mask` (bool; None: all valid) selects the
    response tokens, and whatever stands elsewhere, NaN included, is never read. `num_tokens` is N_tok of the whole
    minibatch, counted before it was split (and over all ranks), so the losses of its microbatches add up.
    `reference_logp` may be None when config.kl_coefficient is 0.

    Raises ValueError for num_tokens < 1 or a missing reference.
    """
    require(num_tokens >= 1, "num_tokens", num_tokens, "the valid tokens of the whole minibatch, at least 1")
    require(
        reference_logp is not None or config.kl_coefficient == 0, "reference_logp", None,
        "log-probs of the reference policy, as kl_coefficient is not 0",
    )  # fmt: skip
    if reference_logp is None:
        reference_logp = logp.detach()
    columns = (logp, old_logp.detach(), sampler_logp, reference_logp.detach(), advantages)
    logp, old_logp, sampler_logp, reference_logp, advantages = columns if mask is None else (c[mask] for c in columns)

    log_ratio = (logp - old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    surrogate, ratio_clip, dual_clip = clipped_surrogate(log_ratio.exp(), advantages, config)
    weight = tis_weights(old_logp, sampler_logp, config.tis_clip)
    k3 = k3_penalty(logp, reference_logp)
    corrected = weight * surrogate  # after the clips, and not on the penalty: TIS corrects the surrogate only
    loss = (corrected + config.kl_coefficient * k3).sum() / num_tokens
    counted = (torch.ones_like(logp), corrected, k3, ratio_clip, dual_clip, -log_ratio, weight)
    return loss, LossStats(*(column.detach().double().sum() for column in counted))
