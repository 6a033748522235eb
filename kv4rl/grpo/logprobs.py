"""Log-probabilities of response tokens from an FP32 head, without the logits of all tokens ever existing at once."""

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 27  # FP32 logits alive at once: 512 MiB, or 883 tokens of Qwen3's vocabulary


def token_logprobs(
    decoder: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    entropy: bool = False,
    max_logits: int = MAX_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log pi(target | prefix) at temperature 1 for every row, and on request the entropy of its distribution.

    hidden: [M, hidden], after the final norm; targets: int64 [M]. Returns FP32 [M] in nats, and FP32 [M] without
    gradient or None. `decoder.logits` is called on chunks of at most `max_logits` logits (at least one row); with more
    than one chunk the backward pass computes each again instead of keeping it.
    """
    rows = max(1, max_logits // decoder.config.vocab_size)
    chunks = list(zip(hidden.split(rows), targets.split(rows), strict=True))
    recompute = len(chunks) > 1 and torch.is_grad_enabled()
    results = []
    for part in chunks:
        if recompute:
            results.append(checkpoint(_chunk, decoder, *part, entropy, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(_chunk(decoder, *part, entropy))
    logp = torch.cat([logp for logp, _ in results])
    return logp, torch.cat([h for _, h in results]) if entropy else None


def _chunk(decoder, hidden: torch.Tensor, targets: torch.Tensor, entropy: bool):
    logits = decoder.logits(hidden)
    logp = -F.cross_entropy(logits, targets, reduction="none")
    return logp, _entropy(logits.detach()) if entropy else None


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """H = logsumexp(z) - sum softmax(z) z, in nats; [M]."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
