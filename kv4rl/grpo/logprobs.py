"""Log-probabilities of response tokens from an FP32 head, without the logits of all tokens ever existing at once.

Projection and log-softmax are one differentiable function (§A.2 "Fused projection and log-probability computation"):
a chunk of logits lives until its few numbers a row are taken, and the backward pass makes it again.
"""

from functools import cache
from types import SimpleNamespace

import torch

MAX_LOGITS = 1 << 29  # FP32 logits alive at once: 2 GiB, or 3,533 tokens of Qwen3's vocabulary


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
    gradient or None. `decoder.logits` is called on chunks of at most `max_logits` logits (at least one row). Logits and
    log-softmax are FP32; in the backward pass the gradient of the logits is rounded to the dtype of `hidden`, as
    between any two layers.
    """
    rows = max(1, max_logits // decoder.config.vocab_size)
    logp, h = _HeadLogProbs.apply(hidden, decoder.head_weight, targets, decoder, rows, entropy)
    return logp, h if entropy else None


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, decoder, rows, entropy):
        functions, found = _functions(hidden.is_cuda), []
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = decoder.logits(part)
            logp, normaliser = functions.log_probs(logits, target)
            found.append((logp, normaliser, functions.entropies(logits, normaliser) if entropy else logp))
        logp, normaliser, h = (torch.cat(column) for column in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.decoder, ctx.rows = decoder, rows
        ctx.mark_non_differentiable(h)
        return logp, h

    @staticmethod
    def backward(ctx, gradient, _):
        hidden, weight, targets, normaliser = ctx.saved_tensors
        functions, rows, factor = _functions(hidden.is_cuda), ctx.rows, weight.to(hidden.dtype)
        to_hidden = torch.empty_like(hidden)
        to_weight = None
        columns = (hidden, targets, normaliser, gradient, to_hidden)
        for part, target, norm, given, out in zip(*(column.split(rows) for column in columns), strict=True):
            to_logits = functions.to_logits(ctx.decoder.logits(part), target, norm, given, hidden.dtype)
            out.copy_(_product(to_logits, factor))
            share = _product(to_logits.t(), part)
            to_weight = share if to_weight is None else to_weight.add_(share)
        return to_hidden, to_weight.to(weight.dtype), None, None, None, None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of equal dtypes, summed and returned in FP32 at least."""
    if a.is_cuda and a.itemsize == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    accumulate = torch.promote_types(a.dtype, torch.float32)
    return a.to(accumulate) @ b.to(accumulate)


def _log_probs(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normaliser = logits.logsumexp(-1)
    return logits.gather(1, targets[:, None])[:, 0] - normaliser, normaliser


def _entropies(logits: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    """H = logsumexp(z) - sum softmax(z) z, in nats; [M]."""
    return normaliser - ((logits - normaliser[:, None]).exp() * logits).sum(-1)


def _to_logits(logits, targets, normaliser, gradient, dtype: torch.dtype) -> torch.Tensor:
    """d logp / d logits, times the gradient of logp [M]: (one at the target - softmax)."""
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((chosen.to(logits.dtype) - (logits - normaliser[:, None]).exp()) * gradient[:, None]).to(dtype)


@cache
def _functions(compiled: bool) -> SimpleNamespace:
    """The row functions, each one or two kernels over the logits where they are compiled."""
    make = (lambda function: torch.compile(function, dynamic=True)) if compiled else (lambda function: function)
    return SimpleNamespace(log_probs=make(_log_probs), entropies=make(_entropies), to_logits=make(_to_logits))
