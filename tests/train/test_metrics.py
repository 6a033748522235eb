import json
import time

import pytest
import torch

from kv4rl.config import InputError
from kv4rl.metrics import MetricsWriter, Timers, read_metrics, summary, without_wall_clock


def test_lines_come_back_in_order_with_lists(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 0.1, "ages": [3, 4]})
        writer.write(2, {"a": 0.2})
    assert read_metrics(tmp_path) == [{"update": 1, "a": 0.1, "ages": [3, 4]}, {"update": 2, "a": 0.2}]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_resume_drops_lines_it_will_repeat_and_a_line_cut_short(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for update in range(4):
            writer.write(update, {"a": float(update)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "a"')
    assert len(read_metrics(tmp_path)) == 4
    with MetricsWriter(tmp_path, resumed_update=2) as writer:
        writer.write(3, {"a": 30.0})
    assert [line["a"] for line in read_metrics(tmp_path)] == [0.0, 1.0, 2.0, 30.0]


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"a": 1}', "\0\0", '{"update": "x"}', "\udcff"])
def test_a_damaged_line_is_named_and_without_it_the_run_goes_on(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(f'{{"update": 0}}\n{line}\n{{"update": 2}}\n'.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"metrics\.jsonl:2=.*delete the line"):
        MetricsWriter(tmp_path, resumed_update=1)
    with pytest.raises(InputError, match=r"metrics\.jsonl:2="):
        read_metrics(tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[2])
    MetricsWriter(tmp_path, resumed_update=1).close()
    assert read_metrics(tmp_path) == [{"update": 0}]


def test_a_run_that_starts_afresh_keeps_no_old_line(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1.0})
    with MetricsWriter(tmp_path):
        pass
    assert read_metrics(tmp_path) == []


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"norm": float("inf"), "nan": float("nan")})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"update": 1, "norm": None, "nan": None}


def test_timers_add_up_and_nest():
    timers = Timers()
    for _ in range(2):
        with timers("outer"), timers("inner"):
            time.sleep(0.01)
    metrics = timers.metrics()
    assert metrics["timing_s/outer"] >= metrics["timing_s/inner"] >= 0.02


def test_only_the_clock_may_differ_between_two_runs():
    line = {"update": 1, "timing_s/gen": 1.0, "perf/throughput": 2.0, "critic/score/mean": 0.5}
    assert without_wall_clock(line) == {"update": 1, "critic/score/mean": 0.5}


def test_summary_names():
    assert summary("x", torch.tensor([1, 2, 6])) == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0}
