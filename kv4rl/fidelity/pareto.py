"""Which arms are worth their bytes: KL against stored bytes, and the decode speedup that those bytes predict.

Bytes are counted at a stated context length and head_dim (the paper's by default), because protection costs a fixed
number of positions: at the short contexts that a CPU can probe, 144 of them weigh more than they do in a rollout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kv4rl.config import require
from kv4rl.fidelity.panels import PANELS
from kv4rl.fidelity.representation import Representation
from kv4rl.paper import REPLAY_SHAPES
from kv4rl.theory.roofline import QWEN3_4B, demands

CONTEXT_TOKENS = 1500  # mean contexts of §B.5's timing states are 1.4k to 1.7k tokens
HEAD_DIM = 128
STATES = REPLAY_SHAPES["4B-300"]


@dataclass(frozen=True)
class Point:
    """One arm: KL in nats with its interval, bytes a position and KV head, predicted decode speedup over BF16."""

    arm: str
    kl: float
    low: float
    high: float
    position_bytes: float
    predicted_speedup: float


def known_arms() -> dict[str, Representation]:
    """Every arm of every panel, by name."""
    return {arm.name: arm.representation for what in PANELS.values() for arm in what.arms(HEAD_DIM)}


def position_bytes(arm: Representation, *, context_tokens: int = CONTEXT_TOKENS, head_dim: int = HEAD_DIM) -> float:
    """Bytes of one position's key and value in one KV head, its share of the protected copies included."""
    require(context_tokens >= 1, "context_tokens", context_tokens, "an integer >= 1")
    share = min(context_tokens, arm.protection.positions) / context_tokens
    return arm.position_bytes(head_dim) + share * arm.protected_bytes(head_dim)


def predicted_speedup(bytes_per_position: float, *, head_dim: int = HEAD_DIM) -> float:
    """Decode-forward speedup over BF16 by Eq. A2 at the states of 4B-300, if steps take what the roofline says.

    A step is its linear layers (weights or products, whichever is longer) and its KV bytes; nothing else is counted,
    so this bounds what a kernel can reach.
    """
    ratio, shares = bytes_per_position / (2 * 2 * head_dim), []
    for requests, context in STATES:
        step = demands(QWEN3_4B, requests, requests * context, tensor_parallel=2)
        linear = max(step.weights_ms, step.compute_ms)
        shares.append((linear + ratio * step.kv_ms) / (linear + step.kv_ms))
    return len(shares) / sum(shares)


def points(rows: Iterable[Mapping[str, str]], *, arithmetic: str = "deployed") -> list[Point]:
    """One point a representation from `sampler_kl` rows of one model; the last row of an arm counts.

    Only arms of one arithmetic compare. Those that no panel has (an earlier command's) are left out, and so is an
    arm that stores what an earlier one does under another name.
    """
    arms, newest = known_arms(), {}
    for row in rows:
        require(row["metric"] == "sampler_kl", "metric", row["metric"], "sampler_kl")
        arm = arms.get(row["arm"])
        if arm is not None and arm.arithmetic == arithmetic:
            newest.setdefault(arm, {})[row["arm"]] = row
    made = []
    for arm, named in newest.items():
        name, row = next(iter(named.items()))
        size = position_bytes(arm)
        kl, low, high = (float(row[field]) for field in ("value", "low", "high"))
        made.append(Point(name, kl, low, high, size, predicted_speedup(size)))
    return made


def front(of: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both bytes and KL, from the smallest up."""
    best, kept = float("inf"), []
    for point in sorted(of, key=lambda point: (point.position_bytes, point.kl)):
        if point.kl < best:
            best = point.kl
            kept.append(point)
    return kept
