"""From model, GPU and cache format to pages, active requests and expected speedups (§A.2 "Phase memory management").

An estimate, not a measurement: continuous refill (Prop. 4.1) bounded by slots and pages, timed by `StepCost`.
"""

from dataclasses import dataclass, replace

from kv4rl.config import PAGE_TOKENS, KVConfig, require
from kv4rl.theory.concentration import refill_context, require_slots
from kv4rl.theory.lengths import LengthDistribution, finite
from kv4rl.theory.roofline import BF16_BYTES, ModelShape, weight_bytes
from kv4rl.theory.step_cost import StepCost

H200_BYTES = 141e9
# Learner state, workspace and graphs: what makes both of the paper's pinned pools (83,022 and 79,639 pages) come out.
RESERVED_BYTES = 38.9e9


@dataclass(frozen=True)
class Plan:
    """What one rollout replica holds and how fast it decodes, at the steady state of continuous refill."""

    kv_budget_gb: float  # memory left for the cache, per GPU
    pages: int  # 16-token pages of the main cache
    slots: int  # requests the engine may hold; each owns a side buffer
    side_buffer_gb: float
    active_requests: float  # the smaller of the slots and what the pages hold on average
    limited_by: str  # "slots" or "pages"
    context_tokens: float  # mean context of an occupied slot (A4)
    resident_kv_gb: float  # V_t of the format: bytes of the contexts held
    step_ms: float
    tokens_per_second: float  # of the replica, decode only


def kv_budget_bytes(
    model: ModelShape, *, tensor_parallel: int, hbm_bytes: float = H200_BYTES, reserved_bytes: float = RESERVED_BYTES
) -> float:
    """Memory per GPU that is left for the KV cache, after weights and what is reserved."""
    weights = weight_bytes(model, tensor_parallel=tensor_parallel)
    embedding = 0 if model.tied_embedding else model.vocab * model.hidden * BF16_BYTES / tensor_parallel
    for name, value in (("hbm_bytes", hbm_bytes), ("reserved_bytes", reserved_bytes)):
        require(finite(value) and value >= 0, name, value, "a finite number >= 0")
    left = hbm_bytes - reserved_bytes - weights - embedding
    expected = f"more than weights and reserve, {(reserved_bytes + weights + embedding) / 1e9:.1f} GB"
    require(left > 0, "hbm_bytes", hbm_bytes, expected)
    return left


def plan(
    cost: StepCost,
    lengths: LengthDistribution,
    *,
    prompt_tokens: float,
    slots: int = 1024,
    kv_budget: float | None = None,
) -> Plan:
    """Plan one replica. `cost` carries model, cache format and rates; `kv_budget` in bytes, or None to derive it."""
    require_slots(slots)
    context = refill_context(lengths, prompt_tokens)
    if kv_budget is None:
        kv_budget = kv_budget_bytes(cost.model, tensor_parallel=cost.tensor_parallel)
    side = cost.slot_bytes * slots
    require(finite(kv_budget), "kv_budget", kv_budget, "a finite number of bytes")
    require(kv_budget > side, "kv_budget", kv_budget, f"more than the side buffers of {slots} slots, {side:.0f} bytes")
    pages = int((kv_budget - side) / cost.page_bytes)
    # On average the last page of a request is half empty.
    by_pages = pages * PAGE_TOKENS / (context + PAGE_TOKENS / 2)
    active = min(slots, by_pages)
    step_ms = float(cost(active, active * context))
    return Plan(
        kv_budget_gb=kv_budget / 1e9,
        pages=pages,
        slots=int(slots),
        side_buffer_gb=side / 1e9,
        active_requests=active,
        limited_by="pages" if by_pages < slots else "slots",
        context_tokens=context,
        resident_kv_gb=active * context * cost.page_bytes / PAGE_TOKENS / 1e9,
        step_ms=step_ms,
        tokens_per_second=active / step_ms * 1e3,
    )


@dataclass(frozen=True)
class Speedup:
    """A cache format against BF16 on the same model, lengths and memory."""

    decode: float  # at BF16's state: the same requests and contexts (decode replay)
    rollout: float  # each at its own state: faster steps and, where pages bind, more requests


def speedup(cost: StepCost, lengths: LengthDistribution, **given) -> Speedup:
    """Predicted speedup of `cost.kv` over BF16; keywords as for `plan`."""
    reference_cost = replace(cost, kv=KVConfig("bf16"))
    reference, own = plan(reference_cost, lengths, **given), plan(cost, lengths, **given)
    context = reference.active_requests * reference.context_tokens
    return Speedup(
        decode=reference.step_ms / float(cost(reference.active_requests, context)),
        rollout=own.tokens_per_second / reference.tokens_per_second,
    )
