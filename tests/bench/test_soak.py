"""`bench soak`: a few seconds of it find nothing, and it finds what it is there to find."""

import json

import pytest
import torch

from kv4rl.bench import soak
from kv4rl.bench.__main__ import main
from kv4rl.results import read_rows

PREEMPTS = ("--pages", "17", "--seed", "4")  # within the first few steps
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def make_soak(tmp_path):
    def make(*words):
        options = soak.parse(["--device", "cpu", "--out", str(tmp_path / "soak.csv"), *words])
        return soak.Soak(options, "kv4rl")

    return make


def test_a_few_seconds_find_no_leak_and_write_a_row(tmp_path, capsys):
    out = tmp_path / "soak.csv"
    main(["soak", "--device", "cpu", "--minutes", "0.01", "--precisions", "kv4rl", *PREEMPTS, "--out", str(out)])
    rows = {row["metric"]: float(row["value"]) for row in read_rows(out)}
    assert rows["leaked_pages"] == rows["leaked_bytes"] == 0 < rows["decode_tokens"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == rows["steps"] > 0


def test_a_run_in_which_nobody_is_preempted_fails(make_soak, monkeypatch):
    monkeypatch.setattr(soak, "PATIENCE", 3)
    with pytest.raises(soak.SoakFailure, match=r"nobody was preempted in \d+ steps: take fewer --pages"):
        make_soak("--pages", "500").run(0.0)


def test_a_failure_is_one_sentence_and_no_success(tmp_path, capsys, monkeypatch):
    """Of two pages no request can be driven out by another: none is admitted beside it."""
    monkeypatch.setattr(soak, "PATIENCE", 20)
    few = ("--longest", "32", "--pages", "2", "--minutes", "0.001", "--precisions", "kv4")
    with pytest.raises(SystemExit) as ended:
        main(["soak", "--device", "cpu", *few, "--out", str(tmp_path / "soak.csv")])
    assert ended.value.code == 1
    assert "nobody was preempted" in capsys.readouterr().err and not (tmp_path / "soak.csv").exists()


def test_every_kind_of_event_happens(make_soak):
    """By number of operations, not by the clock: two hundred of them meet each kind but the rare pause."""
    found = make_soak(*PREEMPTS)
    names = list(soak.OPERATIONS)
    for done in range(200):
        if done == 100:
            found._pause()
        getattr(found, f"_{names[found.rng.choice(len(names), p=list(soak.OPERATIONS.values()))]}")()
    found._pause()
    counted = ("finished", "aborts", "preemptions", "decode_tokens")
    assert all(found.counts[name] > 0 for name in counted) and found.counts["weight_updates"] > soak.WEIGHTS + 1


def test_a_weight_that_was_not_written_is_found(make_soak, monkeypatch):
    found = make_soak()
    name = "model.layers.0.mlp.down_proj.weight"
    monkeypatch.setitem(found.weights[1], name, torch.zeros_like(found.weights[1][name]))
    with pytest.raises(soak.SoakFailure, match="weights 1 give other responses at version 3"):
        found._pause()


def test_a_page_that_nobody_holds_is_found(make_soak):
    found = make_soak()
    found._add()
    found.engine.cache.allocator.allocate(1)
    with pytest.raises(soak.SoakFailure, match="are in use"):
        found._step()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "minutes=0.0"),
        (["--pages", "15"], "pages=15: expected an integer >= 16"),
        (["--out", "/proc/none/soak.csv"], "/proc/none"),
        (["--model", "qwen9"], "model='qwen9'"),
        (["--longest", "100000"], "longest=100000: expected at most the model's 2048 positions"),
        (["--slots", "1"], "slots=1: expected an integer >= 2"),
        (["--seed", "-1"], "seed=-1: expected an integer >= 0"),
        pytest.param(
            ["--device", "cuda"], "device='cuda': expected cpu: this machine has no CUDA device", marks=no_cuda
        ),
    ],
)
def test_bad_input_ends_with_one_sentence_before_any_work(words, message, capsys, monkeypatch):
    monkeypatch.setattr(soak, "Soak", None)
    with pytest.raises(SystemExit) as ended:
        main(["soak", "--device", "cpu", *words])
    assert message in capsys.readouterr().err and ended.value.code == 2
