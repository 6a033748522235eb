"""A run's rows give its curves back, and the ends are means over several updates."""

from dataclasses import replace

import pytest

from kv4rl import train_rows
from kv4rl.config import KVConfig, TrainConfig
from kv4rl.results import read_rows


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
    config = TrainConfig(model="data/models/mini-qwen3", seed=43, kv=KVConfig("kv4"))
    return config, lines, {"value": 0.5, "low": 0.4, "high": 0.6, "n": 64}, tmp_path


def _write(path, rows, **more):
    from kv4rl.results import write_rows

    return write_rows(path, rows, **more)


def test_a_shorter_run_of_the_same_name_leaves_nothing_of_the_longer_one(run):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines * 2, accuracy)
    train_rows.record_run(config, lines, accuracy)
    assert len(train_rows.read_curves(directory=directory)["kv4"]) == len(lines)


def test_curves_come_back_as_they_went(run):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines, accuracy)
    curves = train_rows.read_curves(directory=directory)
    assert list(curves) == ["kv4"]
    assert [line["critic/score/mean"] for line in curves["kv4"]] == pytest.approx([0.1 * i for i in range(8)])


def test_ends_are_means_of_several_updates(run):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines, accuracy)
    (line,) = train_rows.summary(directory=directory)
    assert float(line["reward_first"]) == pytest.approx(0.1) and float(line["reward_last"]) == pytest.approx(0.5)
    assert line["accuracy"] == "0.5" and line["precision"] == "kv4"


def test_the_starting_model_has_one_row_that_stands_beside_every_precision(run):
    config, lines, accuracy, directory = run
    train_rows.record_run(config, lines, accuracy)
    assert train_rows.summary(directory=directory)[0]["accuracy_before"] == "-"
    for precision in ("kv4", "kv4rl"):
        before = accuracy | {"value": 0.25}
        train_rows.record_run(replace(config, kv=KVConfig(precision)), lines, accuracy, before=before)
    (start,) = read_rows(directory / train_rows.FILE, arm="start")
    assert (start["metric"], start["value"], start["low"], start["n"]) == ("accuracy", "0.25", "0.4", "64")
    table = train_rows.summary(directory=directory)
    assert [line["accuracy_before"] for line in table] == ["0.25", "0.25"]
    assert list(table[0]).index("accuracy_before") + 1 == list(table[0]).index("accuracy")
    assert list(train_rows.read_curves(directory=directory)) == ["kv4", "kv4rl"]


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


def test_without_the_file_there_are_no_curves(tmp_path):
    assert train_rows.read_curves(directory=tmp_path) == {} and train_rows.summary(directory=tmp_path) == []
