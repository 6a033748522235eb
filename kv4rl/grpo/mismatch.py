"""How far the sampler's recorded probabilities lie from the policy's (§3 "Sampler mismatch"), as verl names it.

Everything is computed before the clip at C and over the whole minibatch at once: a clamp, or a mean of microbatch
means, would hide drift.
"""

import torch

from kv4rl.grpo.loss import unclipped_tis_weights


def sampler_mismatch(
    old_logp: torch.Tensor, sampler_logp: torch.Tensor, lengths: torch.Tensor, tis_clip: float
) -> dict[str, float]:
    """Mismatch metrics of one minibatch; verl's names, `rollout_corr/*` and `training/*`.

    old_logp, sampler_logp: [N], response tokens, sequence after sequence; lengths: [S] tokens of each. `kl` and `k3_kl`
    estimate KL(q || pi_old) in nats per token; `eff_sample_size` is (sum w)^2 / (N sum w^2) of the unclipped weights.
    """
    old, q = old_logp.double(), sampler_logp.double()
    weights = unclipped_tis_weights(old, q)
    d = old - q
    metrics = {
        "kl": -d.mean(),
        "k3_kl": (d.exp() - d - 1).mean(),
        "chi2_token": weights.square().mean() - 1,
        "rollout_is_mean": weights.mean(),
        "rollout_is_max": weights.max(),
        "rollout_is_min": weights.min(),
        "rollout_is_std": weights.std(correction=0),
        "rollout_is_eff_sample_size": weights.sum().square() / (weights.numel() * weights.square().sum()),
        "rollout_is_ratio_fraction_high": (weights > tis_clip).double().mean(),
        **_perplexities(old, q, lengths),
    }
    result = {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}
    return result | _probability_differences(old.exp(), q.exp())


def _perplexities(old: torch.Tensor, q: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Per-sequence perplexities, averaged over sequences that have tokens."""
    lengths = lengths[lengths > 0]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    mean = lambda x: torch.zeros(len(lengths), dtype=x.dtype).index_add_(0, owner, x) / lengths
    training, rollout = (-mean(old)).exp(), (-mean(q)).exp()
    return {
        "training_ppl": training.mean(),
        "rollout_ppl": rollout.mean(),
        "ppl_ratio": (training / rollout).mean(),
    }


def _probability_differences(policy: torch.Tensor, sampler: torch.Tensor) -> dict[str, float]:
    difference = (policy - sampler).abs()
    metrics = {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_std": float(difference.std(correction=0)),
    }
    if len(policy) >= 2 and policy.std() > 0 and sampler.std() > 0:  # a correlation needs spread on both sides
        correlation = torch.corrcoef(torch.stack([policy, sampler]))[0, 1]
        metrics["training/rollout_actor_probs_pearson_corr"] = float(correlation)
    return metrics
