"""Updated weights into the rollout engine, and proof that they arrived (§A.1, design decision 8)."""

import torch

from kv4rl.engine.engine import RolloutEngine
from kv4rl.grpo.learner import GRPOLearner

CHUNK = 1 << 24  # elements widened to int64 at once
GOLDEN, MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd multipliers


def sync(learner: GRPOLearner, engine: RolloutEngine, version: int) -> None:
    """Copy the learner's compute weights into `engine`, which moves to policy `version`, and compare checksums.

    Raises RuntimeError naming the tensors that do not hold what was sent (a sync that restores or keeps old weights
    shows no other symptom than a mismatch that grows), and whatever `engine.update_weights` raises.
    """
    engine.update_weights(learner.weights.named_compute_weights(), version)
    held = {name: parameter.detach() for name, parameter in engine.decoder.named_parameters()}
    wrong = [
        name
        for name, sent in learner.weights.named_compute_weights()
        if checksum(engine.decoder.shard_of(name, sent).to(held[name].dtype)) != checksum(held[name])
    ]
    if wrong:
        names = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise RuntimeError(f"after the sync to policy_version {version} the engine holds other values of {names}")


def checksum(tensor: torch.Tensor) -> int:
    """64 bits that depend on every bit of a tensor and on their order; equal on CPU and CUDA.

    A sum of hashes of (value, place) in wrapping integer arithmetic, so chunks need no order. -0.0 and 0.0 differ.
    """
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits, total = tensor.detach().contiguous().view(-1).view(width), 0
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + len(chunk) + 1, device=bits.device)
        mixed = (chunk + place * GOLDEN) * MIX
        total += int(((mixed ^ (mixed >> 29)) * MIX).sum())
    return total & (2**64 - 1)
