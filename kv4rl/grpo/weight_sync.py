"""Updated weights into the rollout engine, and proof that they arrived (§A.1, design decision 8)."""

from collections.abc import Iterator

import torch

from kv4rl.engine.engine import RolloutEngine
from kv4rl.grpo.canary import canary_log_probs, check_canary
from kv4rl.grpo.learner import GRPOLearner

CHUNK = 1 << 24  # words mixed at once
GOLDEN, MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd multipliers


def sync(learner: GRPOLearner, engine: RolloutEngine, version: int) -> dict[str, float]:
    """Stream the learner's compute weights into `engine`, which moves to policy `version`, and check what it holds.

    A layer at a time is whole; of each tensor a tensor-parallel engine keeps its slice. Every slice's checksum is
    compared with what was sent, then a fixed prompt's log-probs with the learner's (`grpo/canary.py`). A collective;
    returns `sync/canary_difference` in nats.

    Raises RuntimeError naming the tensors that do not hold what was sent (a sync that restores or keeps old weights
    shows no other symptom than a mismatch that grows) or both log-probs, and whatever `engine.update_weights` raises.
    """
    vocabulary = learner.weights.decoder.config.vocab_size
    expected = canary_log_probs(learner.weights.decoder, vocabulary, learner.device)
    held = {name: parameter.detach() for name, parameter in engine.decoder.named_parameters()}
    sent: dict[str, torch.Tensor] = {}

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in learner.weights.named_compute_weights():
            if name in held:
                sent[name] = checksums(engine.decoder.shard_of(name, tensor).to(held[name].dtype))
            yield name, tensor

    engine.update_weights(stream(), version)
    found = torch.stack([checksums(held[name]) for name in sent])
    differ = (found != torch.stack(list(sent.values()))).tolist()  # the one wait for the device
    wrong = [name for name, other in zip(sent, differ, strict=True) if other]
    if wrong:
        names = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise RuntimeError(f"after the sync to policy_version {version} the engine holds other values of {names}")
    return {"sync/canary_difference": check_canary(expected, engine.decoder, vocabulary, version)}


def checksum(tensor: torch.Tensor) -> int:
    """`checksums` as a number: 64 bits, unsigned."""
    return int(checksums(tensor)) & (2**64 - 1)


def checksums(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that depend on every bit of a tensor and on their order; equal on CPU and CUDA. int64, on the device.

    A sum of hashes of (word, place) in wrapping integer arithmetic, so chunks need no order. -0.0 and 0.0 differ.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    whole = flat.nbytes % 8 == 0
    words = flat.view(torch.int64) if whole else flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + len(chunk) + 1, device=words.device)
        mixed = (chunk + place * GOLDEN) * MIX
        total += ((mixed ^ (mixed >> 29)) * MIX).sum()
    return total
