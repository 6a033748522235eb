import pytest
import torch

from kv4rl.cache.kv_cache import CacheShape, KVCache
from kv4rl.cache.memory_plan import plan_hbm, plan_memory
from kv4rl.config import KVConfig

SHAPE = CacheShape(num_layers=3, query_heads=16, kv_heads=4, head_dim=128, dtype=torch.bfloat16)


@pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4", "kv4rl"])
@pytest.mark.parametrize("budget", [3_000_000, 3_456_789])
def test_the_plan_is_what_a_cache_allocates_and_not_a_page_less(precision, budget):
    kv = KVConfig(precision)
    plan = plan_memory(kv, SHAPE, budget_bytes=budget, num_slots=5)
    cache = KVCache(kv, SHAPE, num_pages=plan.pages, num_slots=5)
    assert (plan.nbytes, plan.page_bytes, plan.side_bytes) == (cache.nbytes, cache.bytes_per_page, cache.side.nbytes)
    assert plan.nbytes <= budget < plan.nbytes + plan.page_bytes
    assert plan.tokens == 16 * plan.pages


def test_int4_buys_nearly_four_times_the_pages():
    pages = {p: plan_memory(KVConfig(p), SHAPE, budget_bytes=10**9, num_slots=1).pages for p in ("bf16", "kv8", "kv4")}
    assert pages["kv4"] / pages["bf16"] == pytest.approx(16 / 4.25, rel=1e-3)
    assert pages["kv8"] / pages["bf16"] == pytest.approx(16 / 8.125, rel=1e-3)


def test_the_side_buffer_does_not_grow_with_the_context_but_with_the_slots():
    plans = [
        plan_memory(KVConfig(), SHAPE, budget_bytes=b, num_slots=n) for b, n in ((10**8, 7), (10**9, 7), (10**9, 14))
    ]
    assert plans[0].side_bytes == plans[1].side_bytes == plans[2].side_bytes // 2


def test_a_budget_that_holds_no_page_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"budget_bytes=1000: expected at least 475392 \(.*449280, one page 26112\)"):
        plan_memory(KVConfig(), SHAPE, budget_bytes=1000, num_slots=1)
    with pytest.raises(ValueError, match="num_slots=0"):
        plan_memory(KVConfig(), SHAPE, budget_bytes=10**9, num_slots=0)


def test_a_stated_budget_is_divided_item_by_item_and_used_to_the_last_page():
    reserved = {"model": 5_000_000, "workspace": 700_000, "metadata": 3_000}
    budget = 12_345_678
    plan = plan_hbm(KVConfig(), SHAPE, budget_bytes=budget, num_slots=3, reserved=reserved)
    assert list(plan.items) == ["model", "workspace", "metadata", "side buffer", "pages"]
    assert {name: plan.items[name] for name in reserved} == reserved
    cache = KVCache(KVConfig(), SHAPE, num_pages=plan.cache.pages, num_slots=3)
    assert plan.items["side buffer"] + plan.items["pages"] == cache.nbytes
    assert plan.nbytes <= budget < plan.nbytes + plan.cache.page_bytes
    assert f"({plan.cache.pages} pages)" in str(plan)


def test_a_budget_too_small_names_the_shortfall_of_each_item():
    reserved = {"model": 5_000_000, "workspace": 700_000}
    plan = lambda budget: plan_hbm(KVConfig(), SHAPE, budget_bytes=budget, num_slots=1, reserved=reserved)
    least = 5_700_000 + 449_280 + 26_112
    assert plan(least).cache.pages == 1
    with pytest.raises(ValueError, match=rf"budget_bytes={least - 1}: expected at least {least} for kv4rl") as error:
        plan(least - 1)
    assert "side buffer 0.449 MB, one page 0.0261 MB (short by 1e-06 MB)" in str(error.value)
    with pytest.raises(ValueError, match=r"model 5 MB, workspace 0.7 MB \(short by 0.6 MB\), side buffer"):
        plan(5_100_000)
