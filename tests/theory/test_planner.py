"""The planner: the paper's pools from memory arithmetic, and limits that bind where they should."""

import pytest

from kv4rl.config import KVConfig
from kv4rl.paper import PUBLISHED
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.planner import kv_budget_bytes, plan, speedup
from kv4rl.theory.roofline import QWEN3_4B, QWEN3_8B
from kv4rl.theory.step_cost import StepCost

SHORT = LengthDistribution.lognormal(300, 0.6, cap=16384)
LONG = LengthDistribution.lognormal(4500, 0.6, cap=16384)


@pytest.mark.parametrize(("model", "name"), [(QWEN3_4B, "4b"), (QWEN3_8B, "8b")])
def test_one_reserve_explains_both_pinned_pools(model, name):
    pages = kv_budget_bytes(model, tensor_parallel=2) / StepCost(model).page_bytes
    assert pages == pytest.approx(PUBLISHED[f"trace/pool_pages_{name}"].value, rel=0.002)


def test_slots_bind_for_short_responses_and_pages_for_long_ones():
    short = plan(StepCost(QWEN3_8B), SHORT, prompt_tokens=130)
    long = plan(StepCost(QWEN3_8B), LONG, prompt_tokens=130)
    assert (short.limited_by, short.active_requests) == ("slots", 1024)
    assert long.limited_by == "pages" and long.active_requests < 400
    assert long.resident_kv_gb <= long.kv_budget_gb


def test_a_smaller_cache_holds_more_requests_and_decodes_faster_twice_over():
    plans = {p: plan(StepCost(QWEN3_8B, KVConfig(p)), LONG, prompt_tokens=130) for p in ("bf16", "kv8", "kv4rl", "kv4")}
    active = [p.active_requests for p in plans.values()]
    assert active == sorted(active)
    assert plans["kv4rl"].side_buffer_gb > 0 == plans["kv4"].side_buffer_gb
    found = speedup(StepCost(QWEN3_8B, KVConfig("kv4rl")), LONG, prompt_tokens=130)
    assert found.decode > 1 and found.rollout > 1
    assert speedup(StepCost(QWEN3_8B), LONG, prompt_tokens=130).rollout == pytest.approx(1)


def test_impossible_plans_are_named():
    with pytest.raises(ValueError, match=r"hbm_bytes=40000000000\.0: expected more than weights and reserve, 42\.9 GB"):
        kv_budget_bytes(QWEN3_4B, tensor_parallel=2, hbm_bytes=4e10)
    with pytest.raises(ValueError, match="slots=0"):
        plan(StepCost(QWEN3_4B), SHORT, prompt_tokens=1, slots=0)
    with pytest.raises(ValueError, match="more than the side buffers of 1024 slots"):
        plan(StepCost(QWEN3_4B, KVConfig("kv4rl")), SHORT, prompt_tokens=1, kv_budget=1e9)
