"""The plan of a run: what each phase holds, and a refusal that names every item."""

from dataclasses import replace

import pytest

from kv4rl.config import KVConfig
from kv4rl.grpo.memory import plan_run
from kv4rl.model.shapes import shape_config
from kv4rl.presets import preset

H200 = 141_000_000_000


def plan(name: str, ranks: int, elastic=True, **changes):
    config = replace(preset(name), **changes)
    return plan_run(config, shape_config(name.replace("_", "-")), config.rollout, ranks, elastic=elastic)


@pytest.mark.parametrize("precision", ["bf16", "kv4rl"])
@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b"])
def test_the_papers_runs_fit_the_papers_machine(name, precision):
    """Table A1: four H200s, FSDP2 over all, the BF16 pool of §B.3 on each."""
    plan(name, 4, kv=KVConfig(precision)).check(H200)


def test_phases_hold_what_takes_its_turn_and_not_the_other():
    phased = plan("qwen3_4b", 4)
    assert "masters" not in phased.collect and "pages" not in phased.learn
    resident = plan("qwen3_4b", 4, memory="resident")
    assert {"masters", "moments", "reference", "pages"} <= resident.collect.keys() & resident.learn.keys()
    assert "pages" in plan("qwen3_4b", 4, elastic=False).learn
    assert "reference" not in plan("qwen3_4b", 4, grpo=replace(preset("mini").grpo, kl_coefficient=0.0)).learn


def test_masters_and_moments_are_divided_and_a_rank_alone_computes_with_a_copy():
    one, four = (plan("qwen3_4b", ranks, tensor_parallel=1).learn for ranks in (1, 4))
    parameters = 4.02e9
    assert one["masters"] == pytest.approx(4 * parameters, rel=0.01) and four["masters"] == one["masters"] // 4
    assert one["moments"] == 2 * one["masters"]
    assert one["compute weights"] == one["reference"] == one["masters"] // 2 and "compute weights" not in four


def test_what_does_not_fit_is_refused_item_by_item():
    with pytest.raises(ValueError, match=r"needed='\S+ GB': expected at most this GPU's 60 GB for phase 'learn'"):
        plan("qwen3_8b", 2, rollout=replace(preset("qwen3_8b").rollout, cache_pages=999)).check(60_000_000_000)
    with pytest.raises(ValueError, match=r"phase 'collect': model \S+ GB, workspace .* pages \S+ GB$"):
        plan("qwen3_8b", 4, kv=KVConfig("bf16")).check(80_000_000_000)
