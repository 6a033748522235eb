"""KL divergence between next-token distributions, from logits, in float64 (Eq. 5.2, §B.5)."""

import torch
from torch import Tensor

from kv4rl.config import require


def sampler_kl(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """D_KL(p || q) in nats per state, float64 [...]: p from `reference_logits`, q from `logits`, both [..., vocab].

    Before temperature and truncation; log-softmax in float64. Identical logits give exactly 0. Raises ValueError on
    unequal shapes and on logits that are not finite.
    """
    require(logits.shape == reference_logits.shape, "logits.shape", tuple(logits.shape), "the reference's shape")
    for name, values in (("reference_logits", reference_logits), ("logits", logits)):
        require(bool(torch.isfinite(values).all()), name, "NaN or infinite entries", "finite numbers")
    log_p = torch.log_softmax(reference_logits.double(), dim=-1)
    log_q = torch.log_softmax(logits.double(), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
