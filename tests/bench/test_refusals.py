"""What no bench begins with: a file that it cannot write, a library that is missing, a plan that did not fit."""

import argparse
import sys

import pytest

from kv4rl.bench import __main__ as command
from kv4rl.bench.refusals import require_counts, require_flashinfer, require_writable
from kv4rl.engine.memory import PlanTooLarge


def test_a_missing_flashinfer_is_named_with_the_arms_that_need_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"arms=\['bf16'\]: FlashInfer is not installed: pip install"):
        require_flashinfer(["bf16"], "cuda")
    require_flashinfer([], "cuda")
    require_flashinfer(["bf16"], "cpu")


def test_a_folder_that_is_missing_is_made_and_a_file_of_something_else_kept(tmp_path):
    require_writable(str(tmp_path / "new" / "rows.csv"))
    assert (tmp_path / "new").is_dir() and not list((tmp_path / "new").iterdir())
    other = tmp_path / "photo.csv"
    other.write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ValueError, match=r"photo\.csv': expected a CSV file of results"):
        require_writable(str(other))
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"columns of photo\.csv"):
        require_writable(str(other))


@pytest.mark.parametrize("value", [0, 1 << 25])
def test_counts_that_cannot_be_meant_are_refused(value):
    with pytest.raises(ValueError, match=f"new-tokens={value}"):
        require_counts(argparse.Namespace(new_tokens=value), new_tokens=1)


def test_a_plan_that_did_not_fit_ends_a_bench_with_one_sentence(monkeypatch, capsys):
    def run(arguments):
        raise PlanTooLarge("out of memory: the plan is model 1 GB")

    monkeypatch.setattr("kv4rl.bench.soak.main", run)
    with pytest.raises(SystemExit) as ended:
        command.main(["soak"])
    assert "kv4rl.bench soak: error: out of memory: the plan" in capsys.readouterr().err and ended.value.code == 1


def test_an_interrupted_bench_ends_with_one_sentence(monkeypatch, capsys):
    def run(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("kv4rl.bench.soak.main", run)
    with pytest.raises(SystemExit) as ended:
        command.main(["soak"])
    assert capsys.readouterr().err == "kv4rl.bench soak: interrupted\n" and ended.value.code == 130
