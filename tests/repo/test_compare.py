"""The comparison takes the newest row, keeps the paper's unit, and says so where nothing was measured."""

from fnmatch import fnmatch

import pytest

from kv4rl import preset
from kv4rl.compare import ABSENT, COMPARISONS, compare
from kv4rl.compare_every import INSTEAD, every_number, preset_values
from kv4rl.paper import PUBLISHED
from kv4rl.results import latest, read_rows, result_row, write_rows

STORAGE_KL = [item for item in COMPARISONS if fnmatch(item.published, "storage/*/kl")]


def test_every_comparison_names_a_published_number():
    assert {item.published for item in COMPARISONS} <= set(PUBLISHED)


def test_an_unanswered_comparison_says_so(tmp_path):
    lines = compare(tmp_path)
    assert len(lines) == len(COMPARISONS) and {line["ours"] for line in lines} == {ABSENT}


def test_a_row_is_shown_in_the_papers_unit_with_its_interval(tmp_path):
    lost = result_row(
        experiment="learning", arm="kv4", model="mini-qwen3", shape="updates=30", metric="deficit_accuracy",
        unit="fraction", value=0.045, low=0.02, high=0.07, n=3,
    )  # fmt: skip
    write_rows(tmp_path / "train.csv", [lost])
    line = next(line for line in compare(tmp_path) if line["ours"] != ABSENT)
    assert line["ours"] == "4.5 points [2, 7]" and line["paper"] == "4.6 points"


def test_rows_on_two_gpus_go_before_those_on_one_and_the_model_is_named(tmp_path):
    def add(model, value):
        about = {"experiment": "replay", "arm": "kv4", "shape": "4B-300", "metric": "speedup_vs_bf16", "unit": "x"}
        write_rows(tmp_path / "replay.csv", [result_row(**about, model=model, value=value)])
        return next(line for line in compare(tmp_path) if line["ours"] != ABSENT)

    assert "qwen3-4b, " in add("qwen3-4b", 2.0)["remark"]
    assert add("qwen3-4b-tp1", 3.0)["ours"] == "2 x"


def test_a_collections_speedup_is_taken_within_one_run(tmp_path):
    def add(arm, value, command):
        about = {"experiment": "iteration", "model": "qwen3-4b", "shape": "4B-500", "metric": "rollout_s", "unit": "s"}
        write_rows(tmp_path / "iteration.csv", [result_row(**about, arm=arm, value=value, command=command)])
        return next((line["ours"] for line in compare(tmp_path) if line["ours"] != ABSENT), ABSENT)

    assert add("kv4rl", 20.0, "first") == ABSENT
    assert add("bf16", 50.0, "second") == ABSENT
    assert add("bf16", 50.0, "first") == "2.5 x"


def test_a_phases_share_is_of_its_own_iteration_and_simulated_where_that_is(tmp_path):
    about = {"experiment": "iteration", "model": "qwen3-8b-tp2", "shape": "8B-400", "arm": "bf16", "unit": "s"}
    add = lambda metric, value, **more: write_rows(
        tmp_path / "iteration.csv", [result_row(**about, metric=metric, value=value, command="one", **more)]
    )
    found = lambda: next((line for line in compare(tmp_path) if line["ours"] != ABSENT), None)
    add("rollout_s", 50.0)
    assert found() is None
    add("iteration_s", 80.0, scope="simulated")
    assert found()["ours"] == "62.5 %" and found()["scope"] == "simulated" and found()["paper"] == "54.1 %"


@pytest.mark.parametrize("item", STORAGE_KL, ids=lambda item: item.published)
def test_a_storage_kl_is_of_the_published_bits(item):
    """An arm's name does not say its group where that is the whole head: int4-k is group 64 at head_dim 64."""
    group = item.published.split("/")[2]
    row = latest(read_rows(item.file, **item.where | {"metric": "bits_per_element"}))
    assert float(row["value"]) == PUBLISHED[f"storage/{group}/bits"].value


def test_every_published_storage_kl_is_compared():
    assert {item.published for item in STORAGE_KL} == {key for key in PUBLISHED if fnmatch(key, "storage/*/kl")}


def test_the_full_list_has_every_number_once_with_all_of_our_rows(tmp_path):
    assert [line["number"] for line in every_number()] == list(PUBLISHED)
    for model, value in (("smollm2-135m", 36.7), ("mini-qwen3", 1.36)):
        about = {"experiment": "fidelity", "arm": "kv4rl", "shape": "4b", "metric": "kl_reduction_vs_kv4", "unit": "x"}
        write_rows(tmp_path / "fidelity.csv", [result_row(**about, model=model, value=value)])
    said = {line["number"]: line["ours"] for line in every_number(tmp_path)}
    assert said["fidelity/4b/kl_reduction_16_128"] == "measured, smollm2-135m: 36.7 x; measured, mini-qwen3: 1.36 x"
    assert said["rollout/8b/cumulative"] == ABSENT and said["config/tis_clip"] == "setting"
    assert said["trace/kv_bytes_per_position"] == "checked in 02"


def test_the_full_list_prints_shares_in_the_papers_unit_and_no_unit_of_one():
    lines = {line["number"]: line for line in every_number()}
    assert lines["config/adam_beta1"]["paper"] == "0.9" and not any(
        line["paper"].endswith(" 1") for line in lines.values()
    )
    assert lines["ragged/4b/retention_vs_kv4"]["paper"] == "94 %" and "%" in lines["ragged/4b/retention_vs_kv4"]["ours"]


def test_every_pattern_of_the_full_list_fits_a_number():
    for pattern in (pattern for patterns in INSTEAD.values() for pattern in patterns):
        assert any(fnmatch(key, pattern) for key in PUBLISHED), pattern


def test_the_4b_preset_has_the_papers_settings():
    found = preset_values(preset("qwen3_4b"))
    assert {key: value for key, value in found.items() if value != PUBLISHED[key].value} == {} and len(found) == 24


def test_extremes_are_over_the_newest_row_of_each_checkpoint(tmp_path):
    about = {"experiment": "replay", "arm": "kv8", "model": "qwen3-4b", "metric": "speedup_vs_bf16", "unit": "x"}
    found = {"4B-100": 1.4, "4B-300": 1.5, "ragged-4B": 1.1}
    write_rows(tmp_path / "replay.csv", [result_row(**about, shape=name, value=value) for name, value in found.items()])
    said = {line["number"]: line["ours"] for line in every_number(tmp_path)}
    assert said["replay/4b/kv8_lowest"].endswith(": 1.4 x") and said["replay/4b/kv8_highest"].endswith(": 1.5 x")
    remarks = {line["quantity"]: line["remark"] for line in compare(tmp_path)}
    lowest = remarks["decode replay, KV8 over BF16, lowest of the 4B checkpoints"]
    assert "; of 4B-100, 4B-300; qwen3-4b, " in lowest, "an extreme says of which checkpoints"
