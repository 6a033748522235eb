"""Figures of whole runs: memory plans, iterations by phase, distances to BF16 rollout."""

import pytest

from kv4rl import preset
from kv4rl.learning import Run
from kv4rl.viz.evaluation import distance_to_bf16, our_distances, paper_distances, sampled_as
from kv4rl.viz.hbm import hbm_plan, plan_rows, plans, shapes_only
from kv4rl.viz.iteration import PHASES, iteration_phases, iteration_rows, unpaired

ROLLOUT = preset("qwen3_4b").rollout


def test_a_shard_of_two_holds_half_of_the_layers_weights_and_no_values():
    whole, shard = (shapes_only("qwen3-4b", size) for size in (1, 2))
    assert all(parameter.is_meta for parameter in shard.parameters())
    count = lambda decoder: sum(parameter.numel() for parameter in decoder.parameters())
    assert 0.45 < count(shard) / count(whole) < 0.55


def test_a_plan_spends_the_whole_budget_and_its_bars_add_up_to_it():
    found = plans("qwen3-4b", ROLLOUT, tensor_parallel=2, budget_bytes=int(100e9))
    figure = hbm_plan({"qwen3-4b": found})
    for place, (name, plan) in enumerate(found.items()):
        total = sum(trace.x[place] for trace in figure.data)
        assert total == pytest.approx(plan.nbytes / 1e9) and 100 - total < plan.cache.page_bytes / 1e9, name
    assert figure.data[0].y[0] == "qwen3-4b · BF16"
    lines = {line["precision"]: line for line in plan_rows(found)}
    assert lines["kv4"]["side buffer, GB"] == "0.00" and float(lines["kv4rl"]["side buffer, GB"]) > 5


def test_a_budget_below_the_model_is_refused_item_by_item():
    with pytest.raises(ValueError, match=r"model .* GB.*workspace"):
        plans("qwen3-8b", ROLLOUT, tensor_parallel=2, budget_bytes=int(8e9))


def rows(**seconds):
    about = {"model": "qwen3-4b", "shape": "4B-300"}
    return [
        about | {"arm": arm, "metric": metric, "value": str(value * factor), "scope": "measured"}
        for arm, factor in (("kv4rl", 1), ("bf16", 2))
        for metric, value in seconds.items()
    ]


def test_iterations_are_listed_bf16_first_with_rollouts_share():
    seconds = dict(zip(PHASES, (6.0, 1.0, 2.0, 0.5, 0.5), strict=True)) | {"iteration_s": 10.0}
    lines = iteration_rows(rows(**seconds))
    assert [line["rollout through"] for line in lines] == ["bf16", "kv4rl"]
    assert lines[0]["rollout, s"] == "12.00" and lines[1]["rollout share"] == "60%"
    figure = iteration_phases(rows(**seconds))
    assert sum(trace.x[0] for trace in figure.data) == 20 and iteration_rows([]) == []
    assert [label.rpartition(", ")[2] for label in figure.data[0].y] == ["BF16", "KV4-RL"]


def test_a_learner_timed_on_part_of_its_tokens_is_not_called_measured():
    found = [row | {"scope": "simulated"} if row["arm"] == "bf16" else row for row in rows(update_s=1.0)]
    assert [line["scope"] for line in iteration_rows(found)] == ["learner simulated", "measured"]


def test_a_run_without_bf16_beside_it_is_named():
    found = rows(rollout_s=6.0)
    assert unpaired(found) == []
    alone = [row for row in found if row["arm"] == "kv4rl"]
    assert unpaired(alone) == ["qwen3-4b, 4B-300: BF16 not measured, so no gain"]


def test_a_learner_without_rollout_is_listed_last_and_drawn_nowhere():
    given = [row | {"arm": "learner"} for row in rows(update_s=2.5) if row["arm"] == "kv4rl"]
    lines = iteration_rows(given + rows(update_s=1.0))
    assert [line["rollout through"] for line in lines] == ["bf16", "kv4rl", "no rollout"]
    assert lines[-1]["update, s"] == "2.50" and "rollout, s" not in lines[-1]
    assert len(iteration_phases(given).data[0].y) == 0


def test_distances_are_the_papers_and_ours_only_from_two_seeds_on():
    paper = paper_distances()
    assert paper["paper, Qwen3-8B"]["kv4"].mean == pytest.approx(-4.6)
    one = {"bf16": {"seed1": Run({"accuracy": 0.8})}, "kv4": {"seed1": Run({"accuracy": 0.7})}}
    assert our_distances({"": one}) == {}
    two = {p: runs | {"seed2": Run({"accuracy": 0.6})} for p, runs in one.items()}
    ((name, found),) = our_distances({"updates=30": two}).items()
    assert "30 updates" in name and found["kv4"].mean == pytest.approx(-5)
    assert len(distance_to_bf16(paper | {name: found}).data) == 3


def test_an_evaluations_temperature_and_problems_are_read_off_its_command():
    found = sampled_as()
    assert found["mini-qwen3", "mini-qwen3"] == {"temperature": "0.6", "problems": "128"}
    assert found["mini-qwen3", "before training, T=1"] == {"temperature": "1", "problems": "64"}
    assert sampled_as("nowhere.csv") == {}
