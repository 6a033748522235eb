"""A fixed prompt under the engine's weights and under the learner's: what a checksum of tensors cannot see.

Right bytes under the wrong name, a fused buffer or a graph that reads elsewhere, a shard of another rank: each leaves
every tensor as it was sent and the policy another one (bug row 8 of notes/rollout-and-grpo.md, TRL #5312).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kv4rl.grpo.logprobs import token_logprobs
from kv4rl.grpo.sharded import reshard
from kv4rl.model.attend import PackedCausal
from kv4rl.model.decoder import Decoder

LENGTH = 24  # tokens of the prompt
STEP, FIRST = 7919, 11  # the i-th is (STEP * i + FIRST) mod vocabulary
MARGIN = 8  # engine and learner differ in more places than the two computations compared for the yardstick
ALONE = 4  # roundings of a log-probability where there is nothing to compare


@torch.no_grad()
def canary_log_probs(decoder: torch.nn.Module, vocabulary: int, device: torch.device) -> torch.Tensor:
    """FP64 [LENGTH - 1] on the CPU: log-probabilities of the prompt's tokens from the second on. A collective."""
    ids = (torch.arange(LENGTH, device=device) * STEP + FIRST) % vocabulary
    hidden = decoder(ids[:-1], torch.arange(LENGTH - 1, device=device), PackedCausal([0, LENGTH - 1]))
    logp, _ = token_logprobs(decoder, hidden, ids[1:])
    reshard(decoder)
    return logp.double().cpu()


def check_canary(expected: torch.Tensor, engine: Decoder, vocabulary: int, version: int) -> float:
    """Largest difference between the learner's canary log-probs, `expected`, and the engine's, in nats.

    Raises RuntimeError with both values when it exceeds what rounding does: the yardstick is the engine with and
    without its compiled functions, which round in other places (on a CPU it has none: some roundings of the dtype).
    """
    with _uncompiled(engine):
        plain = canary_log_probs(engine, vocabulary, engine.device)
    rounding = torch.finfo(engine.dtype).eps * plain.abs().max()
    if engine.pointwise is None:
        rounding *= ALONE
    else:
        compiled = canary_log_probs(engine, vocabulary, engine.device)
        rounding = torch.maximum(rounding, (compiled - plain).abs().max())
    difference = (plain - expected).abs()
    worst = int(difference.nan_to_num(nan=torch.inf).argmax())
    if not bool(difference[worst] <= MARGIN * rounding):
        raise RuntimeError(
            f"after the sync to policy_version {version} the canary's token {worst + 1} has log-probability "
            f"{plain[worst]:.6g} in the engine and {expected[worst]:.6g} in the learner; rounding explains "
            f"{MARGIN * rounding:.2g}"
        )
    return float(difference[worst])


@contextmanager
def _uncompiled(decoder: Decoder) -> Iterator[None]:
    kept, decoder.pointwise = decoder.pointwise, None
    try:
        yield
    finally:
        decoder.pointwise = kept
