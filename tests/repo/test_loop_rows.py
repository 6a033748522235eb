"""What the committed rows must show of the whole loop, on this repository's own hardware rows."""

import pytest

from kv4rl.config import PRECISIONS
from kv4rl.presets import preset
from kv4rl.results import RESULTS, latest, read_rows
from kv4rl.train_rows import START, run_shape


def value(file: str, **where: str) -> float:
    return float(latest(read_rows(RESULTS / file, **where))["value"])


def cpu_run(arm: str, metric: str) -> float:
    """A figure of the loop's own run: the mini preset as it is, on a CPU. Sweeps have other settings and machines."""
    shape = run_shape(preset("mini"))
    rows = read_rows(RESULTS / "train.csv", experiment="train", arm=arm, model="mini-qwen3", shape=shape, metric=metric)
    return float(latest(row for row in rows if "cores" in row["hardware"])["value"])


def test_reward_rises_under_kv4rl_rollout_on_a_cpu():
    assert cpu_run("kv4rl", "reward_last") - cpu_run("kv4rl", "reward_first") >= 0.15


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_ends_above_the_start_under_the_common_evaluator(precision):
    assert cpu_run(precision, "accuracy") > cpu_run(START, "accuracy") + 0.15


def test_greedy_outputs_with_the_unquantised_cache_are_transformers_own():
    row = latest(read_rows(RESULTS / "fidelity.csv", experiment="parity", arm="bf16"))
    assert (float(row["value"]), int(row["n"])) == (64, 64)


@pytest.mark.parametrize("model", ["smollm2-135m", "mini-qwen3"])
def test_sampler_kl_is_ordered_as_the_formats(model):
    where = {"model": model, "shape": "loop", "metric": "sampler_kl"}
    kl = [value("fidelity.csv", arm=arm, **where) for arm in ("kv8", "kv4rl", "kv4")]
    assert kl == sorted(kl)


def test_the_mini_models_lengths_are_heavy_tailed_and_it_starts_half_trained():
    row = {"experiment": "mini_model", "arm": "temperature_1"}
    assert value("mini_model.csv", metric="p99_over_median", **row) >= 5
    assert 0.3 <= value("mini_model.csv", metric="reward", **row) <= 0.6
