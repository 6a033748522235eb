"""A command that is given what it cannot use ends with one sentence and status 2, before it has done anything."""

import importlib
import subprocess
import sys

import pytest

from kv4rl.cli import one_sentence
from kv4rl.config import InputError, require
from kv4rl.results import REPOSITORY

WRONG = [  # module, words, what the sentence names
    ("kv4rl.train", "--model modle", "model='modle': expected a model directory, a name under"),
    ("kv4rl.train", "--tasks nowhere.jsonl", "tasks='nowhere.jsonl': expected mini, sums, a .jsonl or .p"),
    ("kv4rl.train", "--tasks /proc/self", "tasks='/proc/self': expected mini, sums, a .jsonl or .parquet file that ex"),
    ("kv4rl.train", "--rollout.cache_pages 1000000000000", "cache pages=1000000000000: expected fewer pages or more"),
    ("kv4rl.train", "--kv.recent_tokens 4096", "sink_tokens + recent_tokens = 16 + 4096=4112: expected at most the m"),
    ("kv4rl.train", "--rollout.responses_per_group 1", "responses_per_group=1: expected at least 2"),
    ("kv4rl.train", "--rollout.groups_per_update 0", "groups_per_update=0: expected an integer >= 1"),
    ("kv4rl.train", "--rollout.oversubscription nan", "oversubscription=nan: expected a number >= 0"),
    ("kv4rl.train", "--rollout.age_limit 0", "age_limit=0: expected an integer >= 1"),
    ("kv4rl.train", "--rollout.max_active_requests 4096", "step_tokens=1024: expected at least max_active_requests"),
    ("kv4rl.train", "--rollout.cache_pages 9", "pages=66: expected at most the 9 pages of the pool"),
    ("kv4rl.train", "--rollout.max_response_tokens 9999", "positions=10027: expected at most the model's 2048"),
    ("kv4rl.train", "--rollout.max_prompt_tokens 9", "prompt_tokens=28: expected at most max_prompt_tokens=9"),
    ("kv4rl.train", "--rollout.workspace_tokens 99", "prefix_tokens=1051: expected at most workspace_tokens=99"),
    ("kv4rl.train", "--device cuda:9", "device='cuda:9': expected"),
    ("kv4rl.train", "--output_dir /proc/x", "/proc/x"),
    ("kv4rl.train", "--kv.precison kv4", "did you mean --kv.precision?"),
    ("kv4rl.train_rows", "--updates 3", "updates=3: expected at least 8 for rows of a run"),
    ("kv4rl.train_rows", "--tasks other.jsonl", "tasks='other.jsonl': expected one of mini, sums"),
    ("kv4rl.train_rows", "--model modle", "model='modle'"),
    ("kv4rl.sweep", "--seeds 1 1", "seeds=[1, 1]: expected each once"),
    ("kv4rl.sweep", "--updates 3", "updates=3: expected at least 8"),
    ("kv4rl.fidelity", "--model modle", "model='modle'"),
    ("kv4rl.fidelity", "--model mini-qwen3 --precisions int3", "precision='int3': expected one of bf16, kv8, kv4, kv4"),
    ("kv4rl.fidelity", "--model mini-qwen3 --precisions kv4 kv4", "precisions=['kv4', 'kv4']: expected each once"),
    ("kv4rl.fidelity", "--model mini-qwen3 --recent 4096", "sink_tokens + recent_tokens = 16 + 4096=4112"),
    ("kv4rl.fidelity", "--model mini-qwen3 --backend cudnn", "backend='cudnn': expected one of auto"),
    ("kv4rl.fidelity.experiments", "--model mini-qwen3 --panels 4b --seed -1", "seed=-1: expected an integer >= 0"),
    ("kv4rl.bench.parity", "--model modle", "model='modle'"),
    ("kv4rl.bench.parity", "--prompts 0", "prompts=0: expected an integer >= 1"),
    ("kv4rl.bench.parity", "--new-tokens 2048", "prompt and new-tokens=2076: expected at most the model's 2048"),
    ("kv4rl.tasks.measure", "modle", "model='modle'"),
    ("kv4rl.tasks.pretrain", "--steps 10", "evaluate_every=50: expected at most steps=10"),
    ("kv4rl.tasks.export", "--count 0", "count=0: expected an integer >= 1"),
    ("kv4rl.rollout.paper_traces", "--seeds 0", "seeds=0: expected an integer >= 1"),
    ("kv4rl.replicate", "--output-dir /proc/x", "/proc/x"),
    ("kv4rl.execute", "nowhere.ipynb --output-dir /proc/x", "notebook='nowhere.ipynb': expected a file that exists"),
]  # fmt: skip


def main_of(module: str):
    found = importlib.import_module(module)
    return getattr(found, "main", None) or importlib.import_module(f"{module}.__main__").main


@pytest.mark.parametrize(("module", "words", "sentence"), WRONG, ids=lambda value: value.replace("kv4rl.", ""))
def test_wrong_input_ends_with_one_sentence_and_nothing_done(tmp_path, monkeypatch, capsys, module, words, sentence):
    monkeypatch.chdir(tmp_path)
    extra = ["--output_dir", "run"] if module == "kv4rl.train" and "output_dir" not in words else []
    with pytest.raises(SystemExit) as ending:
        main_of(module)([*words.split(), *extra])
    out, err = capsys.readouterr()
    assert ending.value.code == 2 and sentence in err and "Traceback" not in err
    assert err.splitlines()[-1].startswith(("python -m " + module, module)) and not out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "file='tasks.jsonl': expected at least one line"),
        ('{"prompt": "n"}', "tasks.jsonl:1 fields=['prompt']: expected also `solution` (or `answer`)"),
        (
            '{"prompt": "What is 1+1?", "answer": "2"}',
            "tasks.jsonl:1 prompt='Whatis?': expected only characters",
        ),
        ('{"prompt": "n", "answer": "?"}', "none of 1 is, the first because of gold='?'"),
    ],
)
def test_wrong_task_files_end_a_training_before_it_starts(tmp_path, monkeypatch, capsys, content, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        main_of("kv4rl.train")(["--tasks", "tasks.jsonl", "--output_dir", "run"])
    assert sentence in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_step_of_replicate_that_fails_ends_it_with_its_own_words(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("kv4rl.replicate.STEPS", (("a wrong step", "kv4rl.train_rows --model modle"),))
    with pytest.raises(SystemExit, match="2"):
        main_of("kv4rl.replicate")(["--output-dir", str(tmp_path)])
    said = capfd.readouterr().err.splitlines()
    assert said[-2].startswith("kv4rl.train_rows: error: model='modle'")
    assert said[-1] == "kv4rl.replicate: error: step `a wrong step` ended with status 2"


def test_a_whole_process_says_only_that_sentence(tmp_path):
    words = [sys.executable, "-m", "kv4rl.train", "--model", "modle", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("kv4rl.train: error: model='modle'") and not (tmp_path / "run").exists()


def test_a_bug_keeps_its_traceback(capsys):
    """Also a ValueError, if no boundary raised it; and the cause of a sentence can still be looked at."""
    with pytest.raises(ValueError, match="of our own"), one_sentence("program"):
        raise ValueError("of our own")
    with pytest.raises(SystemExit) as ending, one_sentence("program"):
        require(False, "field", 1, "2")
    assert isinstance(ending.value.__cause__, InputError)
    assert capsys.readouterr().err == "program: error: field=1: expected 2\n"
