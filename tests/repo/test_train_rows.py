"""A run's rows give its curves back, and the ends are means over several updates."""

from dataclasses import replace

import pytest

from kv4rl import learning, train_rows
from kv4rl.config import KVConfig
from kv4rl.presets import override, preset
from kv4rl.results import read_rows, write_rows


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(train_rows, "write_rows", lambda file, rows, **more: _write(tmp_path / file, rows, **more))
    lines = [
        {
            "critic/score/mean": 0.1 * i,
            "response_length/mean": 100 + i,
            "actor/kl_loss": 0.0,
            "rollout_corr/k3_kl": 1e-3,
        }
        for i in range(8)
    ]
    config = replace(preset("mini"), model="data/models/mini-qwen3", kv=KVConfig("kv4"))
    return config, lines, {"value": 0.5, "low": 0.4, "high": 0.6, "n": 64}, tmp_path


def _write(path, rows, **more):
    from kv4rl.results import write_rows

    return write_rows(path, rows, **more)


def test_a_shorter_run_of_the_same_name_leaves_nothing_of_the_longer_one(run):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines * 2, accuracy)
    train_rows.record_run(config, lines, accuracy)
    assert len(learning.read_runs(directory=directory)[""]["kv4"]["seed43"].lines) == len(lines)


def test_curves_come_back_as_they_went(run):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines, accuracy)
    setting = learning.read_runs(directory=directory)[""]
    assert list(setting) == ["kv4"]
    assert [line["critic/score/mean"] for line in setting["kv4"]["seed43"].lines] == pytest.approx(
        [0.1 * i for i in range(8)]
    )


def test_ends_are_means_of_several_updates(run):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines, accuracy)
    ends = learning.read_runs(directory=directory)[""]["kv4"]["seed43"].ends
    assert ends["reward_first"] == pytest.approx(0.1) and ends["reward_last"] == pytest.approx(0.5)
    assert ends["accuracy"] == 0.5


def test_a_run_is_named_by_its_seeds_and_by_what_is_not_the_presets():
    mini = preset("mini")
    assert train_rows.run_shape(override(mini, {"kv.precision": "kv8", "output_dir": "x", "device": "cpu"})) == "seed43"
    other = override(mini, {"seed": 1, "rollout.seed": 1, "updates": 30, "grpo.learning_rate": 3e-4})
    assert train_rows.run_shape(other) == "seed1/updates=30,grpo.learning_rate=0.0003"
    assert train_rows.run_shape(override(mini, {"rollout.seed": 7})) == "seed43-7"


def test_rows_of_another_model_are_told_apart_from_its_own_preset_and_reported_by_themselves(run):
    config, lines, accuracy, directory = run
    small = preset("smollm2")
    assert train_rows.run_shape(small) == "seed43"
    assert train_rows.run_shape(override(small, {"tasks": "mini"})) == "seed43/tasks=mini"
    train_rows.record_run(config, lines, accuracy)
    train_rows.record_run(override(small, {"updates": 40}), lines, accuracy, before=accuracy)
    said = "\n".join(learning.report((directory / train_rows.FILE).resolve()))
    assert "mini-qwen3, partial collection, learning rate 0.00015, 25 updates:" in said
    assert "smollm2-135m, partial collection, learning rate 2e-05, 40 updates:" in said
    assert said.count("accuracy before training") == 1


def test_the_starting_model_has_one_row_for_all_precisions_and_settings(run):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines, accuracy)
    assert learning.start_accuracy(directory=directory) is None
    for given in ({"kv.precision": "kv4rl"}, {"updates": 30}):
        train_rows.record_run(override(config, given), lines, accuracy, before=accuracy | {"value": 0.25})
    (start,) = read_rows(directory / train_rows.FILE, arm="start")
    assert (start["shape"], start["value"], start["low"], start["n"]) == ("seed43", "0.25", "0.4", "64")
    assert learning.start_accuracy(directory=directory).mean == 0.25
    assert list(learning.read_runs(directory=directory)) == ["", "updates=30"]


def test_of_machines_with_as_many_runs_the_later_counts_and_its_own_start(run):
    """The H200's sweep was not shown: the CPU's, equally large and of one day, came first in the file."""
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines, accuracy, before=accuracy | {"value": 0.25})
    path = (directory / train_rows.FILE).resolve()
    first = read_rows(path)
    gpu = [row | {"hardware": "GPU"} for row in first]
    start = [row | {"value": "0.5"} for row in gpu if row["arm"] == "start"]
    others = [row for row in gpu if row["arm"] != "start"]
    write_rows(path, start + first + others, drop=lambda row: True)
    (found,) = learning.read_runs(directory=directory)[""]["kv4"].values()
    assert found.row["hardware"] == "GPU"
    assert learning.start_accuracy(directory=directory).mean == 0.5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"value": "nan"}, "value of kv4 seed43 .*expected a finite number"),
        ({"value": "abc"}, "value of kv4 seed43 .*'abc'"),
        ({"shape": "seed43@x"}, "shape='seed43@x'"),
        ({"shape": "seed43/foo"}, "shape='seed43/foo'"),
        ({"shape": "seed43@1", "metric": "foo"}, "metric='foo'"),
    ],
)
def test_a_row_that_says_nothing_of_a_run_is_named(run, changed, message):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines, accuracy)
    path = (directory / train_rows.FILE).resolve()
    rows = read_rows(path)
    last = next(row for row in reversed(rows) if "@" not in row["shape"])
    write_rows(path, [*rows, last | changed])
    with pytest.raises(ValueError, match=message):
        learning.report(path)


def test_start_judges_the_starting_model_and_trains_nothing(run, monkeypatch, capsys):
    """The same evaluator, problems and noise as for a trained policy; few of them here."""
    *_, directory = run
    monkeypatch.setattr(train_rows, "train", None)
    judge = train_rows.judge
    monkeypatch.setattr(train_rows, "judge", lambda *given: judge(*given, prompts=4, samples=2))
    train_rows.main(["start", "--preset", "mini", "--rollout.max_response_tokens", "64"])
    (start,) = read_rows(directory / train_rows.FILE)
    assert (start["arm"], start["model"], start["shape"], start["n"]) == ("start", "mini-qwen3", "seed43", "8")
    assert "rows in" in capsys.readouterr().out


def test_a_run_too_short_for_two_ends_is_refused(run):
    config, lines, accuracy, _ = run
    with pytest.raises(ValueError, match="updates=5"):
        train_rows.record_run(config, lines[:5], accuracy)


def test_without_the_file_there_are_no_runs(tmp_path):
    assert learning.read_runs(directory=tmp_path) == {} and learning.start_accuracy(directory=tmp_path) is None
