"""Result files: one row a key, complete, replaced in one move, made again by the command they name."""

import pytest

from kv4rl import results


def row(value=1.0, arm="kv4", **other):
    return results.result_row(
        experiment="t", arm=arm, model="m", shape="loop", metric="sampler_kl", unit="nats", value=value, **other
    )


def test_a_row_of_equal_key_replaces_the_old_one(tmp_path):
    path = tmp_path / "x.csv"
    results.write_rows(path, [row(1.0), row(2.0, arm="kv8")])
    results.write_rows(path, [row(3.0)])
    assert [(r["arm"], r["value"]) for r in results.read_rows(path)] == [("kv4", "3"), ("kv8", "2")]
    assert not path.with_suffix(".csv.partial").exists()


def test_rows_are_filtered_by_column(tmp_path):
    path = results.write_rows(tmp_path / "x.csv", [row(1.0), row(2.0, arm="kv8")])
    assert [r["value"] for r in results.read_rows(path, arm="kv8")] == ["2"]
    assert all(r["command"] and r["hardware"] and r["commit"] for r in results.read_rows(path))


@pytest.mark.parametrize(
    ("wrong", "names"),
    [({"value": float("nan")}, "value"), ({"arm": ""}, "arm"), ({"scope": "guessed"}, "scope")],
)
def test_an_incomplete_row_is_refused(wrong, names):
    with pytest.raises(ValueError, match=names):
        row(**wrong)


def test_a_missing_file_says_which_command_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="run the command"):
        results.read_rows(tmp_path / "none.csv")


def test_latest_takes_the_newest_date_then_the_later_line():
    rows = [{"date": "2026-01-02", "v": 1}, {"date": "2026-01-02", "v": 2}, {"date": "2026-01-01", "v": 3}]
    assert results.latest(rows)["v"] == 2
    with pytest.raises(ValueError, match="at least one row"):
        results.latest([])


@pytest.mark.parametrize(
    ("ranks", "start"),
    [
        ({}, "python -m"),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "python -m"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "torchrun --nproc-per-node 2 -m"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nproc-per-node 4 --nnodes 2 -m"),
    ],
)
def test_a_rows_command_starts_as_many_processes_as_made_it(monkeypatch, ranks, start):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    script = results.REPOSITORY / "kv4rl" / "bench" / "__main__.py"
    monkeypatch.setattr(results.sys, "argv", [str(script), "replay", "--tp", "2"])
    assert results.this_command() == f"{start} kv4rl.bench replay --tp 2"


def test_stored_rows_of_several_gpus_are_started_by_torchrun():
    rows = [row for path in results.RESULTS.glob("*.csv") for row in results.read_rows(path)]
    several = [row["command"] for row in rows if row["hardware"].startswith("2x ")]
    assert several and all(command.startswith("torchrun --nproc-per-node 2 -m kv4rl") for command in several)


def test_every_stored_speedup_of_a_replay_has_the_steps_behind_it():
    """Four aggregates of a run by hand had none, and their command named an arm without any row."""
    rows = results.read_rows("replay.csv", experiment="replay")
    timed = {(row["arm"], row["model"], row["shape"].partition("/")[0]) for row in rows if "/" in row["shape"]}
    aggregates = [row for row in rows if row["metric"] in ("speedup_vs_bf16", "retention_vs_kv4")]
    bare = [row for row in aggregates if (row["arm"], row["model"], row["shape"]) not in timed]
    assert aggregates and not bare
    known = {"decode_replay_ms", "speedup_vs_bf16", "retention_vs_kv4", "repeat_spread"}
    floor = {"products_ms", "attention_ms", "sums_ms", "floor_ms", "forward_ms", "over_floor"}
    assert {row["metric"] for row in rows} <= known | floor, "what neither bench writes is no row of theirs"
