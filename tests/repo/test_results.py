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
