"""The whole command on the mini model's task file: scores, rows, tables, and runs that were cut short."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv4rl.config import InputError
from kv4rl.evaluation import EvaluationResult
from kv4rl.evaluation.__main__ import main, model_name
from kv4rl.evaluation.benchmarks import BENCHMARKS
from kv4rl.evaluation.records import Record, RecordFile, result_of
from kv4rl.evaluation.report import evaluation_rows, format_table, table
from kv4rl.evaluation.run import EvaluationSettings, Evaluator
from kv4rl.model.weights import MODELS_DIR
from kv4rl.results import COLUMNS, REPOSITORY, read_rows, write_rows
from kv4rl.rewards import Grader

TASKS = REPOSITORY / "data" / "tasks" / "mini-evaluation.jsonl"
WORDS = REPOSITORY / "data" / "tasks" / "word_problems.jsonl"
MINI = ["--model", "mini-qwen3", "--sets", str(TASKS), "--samples", "2", "--seeds", "43", "44", "--temperature", "2"]
MINI += ["--top-p", "1", "--max-response-tokens", "96", "--device", "cpu", "--workers", "1"]
RECORD = Record("a", [1.0, 0.0], [1.0, 0.0], [True, True], [False, True], [4, 9], 0)


def run(output, limit, *more):
    main([*MINI, "--limit", str(limit), "--output", str(output), *more])
    return [(output / "mini-evaluation" / f"seed{seed}.jsonl").read_text().splitlines() for seed in (43, 44)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of five problems: its folder and the lines of its record files."""
    output = tmp_path_factory.mktemp("whole")
    return output, run(output, 5)


def test_a_run_records_every_problem_and_writes_rows(whole):
    output, records = whole
    for lines in records:
        problems = [json.loads(line) for line in lines[1:]]
        assert sorted(entry["problem_id"] for entry in problems) == [f"mini-evaluation-{i}" for i in range(1, 6)]
        assert all(len(entry["verl"]) == 2 and set(entry["verl"]) <= {0, 1} for entry in problems)
    assert records[0][1:] != records[1][1:]  # seeds draw differently
    rows = read_rows(output / "evaluation.csv", experiment="evaluation_seed", metric="avg_at_k")
    assert [(row["shape"], row["n"]) for row in rows] == [
        (f"mini-evaluation[:5]@seed{seed}", "10") for seed in (43, 44)
    ]
    means = [np.mean([json.loads(line)["verl"] for line in lines[1:]]) for lines in records]
    assert [float(row["value"]) for row in rows] == pytest.approx(means)
    (line,) = table(directory=output)
    assert line["checkpoint"] == "mini-qwen3" and "±" in line["mini-evaluation[:5]"]


def test_a_run_cut_short_continues_and_ends_as_one_that_was_not(whole, tmp_path, monkeypatch, capsys):
    append, written = RecordFile.append, []

    def until_the_third(self, record):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(record)
        append(self, record)

    monkeypatch.setattr(RecordFile, "append", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 5)
    monkeypatch.undo()
    path = tmp_path / "mini-evaluation" / "seed43.jsonl"
    path.write_bytes(path.read_bytes() + b'{"problem_id": "mini-eval')  # a kill in the middle of a line
    records = run(tmp_path, 5)
    assert "seed 43: 2 of 5 problems are in" in capsys.readouterr().out
    assert [sorted(lines) for lines in records] == [sorted(lines) for lines in whole[1]]
    values = [[row["value"] for row in read_rows(folder / "evaluation.csv")] for folder in (whole[0], tmp_path)]
    assert values[0] == values[1]


def test_a_finished_run_samples_nothing_again(whole, monkeypatch):
    output, records = whole
    monkeypatch.setattr(Evaluator, "_sample", None)
    monkeypatch.chdir(output.parent)
    assert run(Path(output.name), 5) == records
    (line,) = table(directory=output)
    assert len(run(output, 3)[0]) == 6  # a smaller limit reads what is there
    assert "mini-evaluation[:3]" in table(directory=output)[0] and line["mini-evaluation[:5]"]


def test_other_settings_do_not_continue_a_run(whole, capsys):
    with pytest.raises(SystemExit) as ending:
        run(whole[0], 5, "--temperature", "0.5")
    assert ending.value.code == 2
    assert "temperature=0.5: expected 2.0, with which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [("--seeds 1 1", "seeds=.1, 1.: expected one or more, each once"), ("--samples 0", "samples=0"),
     ("--limit 0", "limit=0"), ("--top-p 0", "top_p=0"), ("--model modle", "model='modle'"),
     ("--workers 0", "workers=0"),     ("--sets nowhere.jsonl", "data file='nowhere.jsonl'"),
     ("--max-response-tokens 4096", r"positions of mini-ev.*2048, .*\(at most 20\d\d fit\)"),
     ("--cache-pages 100000000000", "cache pages=100000000000: expected fewer pages or more memory: they need"),
     ("--max-prompt-tokens 9", "tokens in the prompt of mini-evaluation-1=28"), ("--chat", "chat=True"),
     (f"--sets {WORDS}", "prompt of word_problems-1=.*characters")],
)  # fmt: skip
def test_what_cannot_be_evaluated_ends_with_one_sentence(tmp_path, monkeypatch, capsys, words, named):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ending:
        main([*MINI, "--output", "run", *words.split()])
    assert ending.value.code == 2
    assert re.search(named, capsys.readouterr().err)
    assert all(path.read_bytes().count(b"\n") == 1 for path in Path("run").glob("*/*"))  # no problem was recorded


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"garbage", 1), (b"garbage\n", 1), (b'{"settings": {}}\n', 1), (b"\xff\n", 1), (b"[]\n", 1),
     (b'{"settings": {"seed": 1}, "commit": "c"}\n{}\n', 2),
     (b'{"settings": {"seed": 1}, "commit": "c"}\n{"problem_id": 3}\n', 2),
     (b'{"settings": {"seed": 1}, "commit": "c"}\n\xff\xfe\n', 2)],
)  # fmt: skip
def test_a_damaged_record_file_is_named_with_its_line_and_left_alone(tmp_path, content, line):
    path = tmp_path / "seed1.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"seed1.jsonl:{line}='.*': expected"):
        RecordFile(path, {"seed": 1})
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [{"verl": [1.0]}, {name: [1] * 3 for name in ("verl", "last_box", "has_box", "truncated", "response_tokens")},
     {"verl": [7.0, 0.0]}, {"last_box": [0.5, 0]}, {"truncated": [2, 0]}, {"response_tokens": [-1, 3]},
     {"response_tokens": [1.5, 3]}, {"grading_failures": -1}],
)  # fmt: skip
def test_a_record_of_other_values_or_another_k_is_refused_naming_its_line(tmp_path, change):
    path = tmp_path / "seed1.jsonl"
    with RecordFile(path, {"samples": 2}) as records:
        records.append(RECORD)
        records.append(replace(RECORD, problem_id="b", **change))
    with pytest.raises(InputError, match=r"seed1.jsonl:3='.*': expected the record of one problem: delete the line"):
        RecordFile(path, {"samples": 2})


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [("mini-evaluation/seed44.jsonl", b"{}\n", "seed44.jsonl:1='{}': expected an evaluation's settings"),
     ("evaluation.csv", b"a,b\n1,2\n", "columns of evaluation.csv=\\['a', 'b'\\]: expected also"),
     ("evaluation.csv", b"\xff\n", "evaluation.csv': expected a results file or none"),
     ("evaluation.csv", ",".join((*COLUMNS, "more")).encode() + b"\n" + b"1," * 16 + b"1\n", "none, or a results")],
)  # fmt: skip
def test_files_of_others_are_noticed_before_anything_is_sampled(tmp_path, monkeypatch, capsys, file, content, named):
    monkeypatch.setattr(Evaluator, "_sample", None)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, 1)
    assert re.search(named, capsys.readouterr().err)
    assert (tmp_path / file).read_bytes() == content


@pytest.mark.parametrize(
    ("writer", "status", "file"),
    [("kv4rl.evaluation.__main__.write_rows", "1", "evaluation.csv"), ("os.fsync", "2", "seed43.jsonl")],
)
def test_a_full_disk_ends_the_command_with_the_files_name(whole, monkeypatch, capsys, writer, status, file):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, full)
    with pytest.raises(SystemExit, match=status):
        run(whole[0], 5)
    assert re.search(rf"{file} could not be written .*No space left", capsys.readouterr().err.splitlines()[-1])


def test_a_record_file_has_one_writer_and_drops_half_a_line(tmp_path):
    path = tmp_path / "seed1.jsonl"
    with RecordFile(path, {"seed": 1}) as records:
        records.append(RECORD)
        with pytest.raises(InputError, match="no other evaluation writes"):
            RecordFile(path, {"seed": 1})
    path.write_bytes(path.read_bytes()[:-5])
    with RecordFile(path, {"seed": 1}) as records:
        assert records.done == {}
        records.append(RECORD)
    with RecordFile(path, {"seed": 1}) as records:
        assert records.done == {"a": RECORD}
    with pytest.raises(InputError, match=r"seed=2: expected 1, with which .*seed1.jsonl was begun"):
        RecordFile(path, {"seed": 2})


def scored(*rows):
    return result_of([Record(str(i), row, row, [True] * 2, [False] * 2, [3] * 2, 0) for i, row in enumerate(rows)])


def test_rows_and_table_average_sets_within_a_seed_first(tmp_path):
    results: dict[int, dict[str, EvaluationResult]] = {
        42: {"math500": scored([1.0, 1.0], [1.0, 0.0]), "aime24": scored([0.0, 0.0])},
        43: {"math500": scored([1.0, 0.0], [0.0, 0.0]), "aime24": scored([1.0, 0.0])},
    }
    rows = evaluation_rows(results, arm="last", model="own", reading="verl", command="own")
    path = write_rows(tmp_path / "evaluation.csv", rows)
    cells = {(row["shape"], row["metric"]): row for row in read_rows(path, experiment="evaluation")}
    assert float(cells["math500", "avg_at_k"]["value"]) == 0.5
    assert float(cells["math500", "avg_at_k"]["high"]) == pytest.approx(0.5 + np.std([0.75, 0.25], ddof=1), abs=1e-5)
    assert float(cells["mean", "avg_at_k"]["value"]) == 0.375
    assert float(cells["mean", "avg_at_k"]["high"]) == pytest.approx(0.375)  # 0.375 in both seeds
    assert float(cells["math500", "pass_at_k"]["value"]) == 0.75
    (line,) = table(directory=tmp_path)
    assert list(line) == ["model", "checkpoint", "MATH-500", "AIME24", "Mean"]
    assert (line["MATH-500"], line["Mean"]) == ("50.0±35.4", "37.5±0.0")
    assert format_table([line]).splitlines()[1].split() == ["own", "last", "50.0±35.4", "25.0±35.4", "37.5±0.0"]
    assert table(directory=tmp_path / "none") == [] and format_table([]) == "no rows"


def test_parts_of_sets_stand_in_the_papers_order(tmp_path):
    parts = {f"{name}[:1]": scored([1.0]) for name in ("math500", "own", "aime24", "amc23")}
    write_rows(
        tmp_path / "evaluation.csv", evaluation_rows({42: parts}, arm="a", model="m", reading="verl", command="c")
    )
    (line,) = table(directory=tmp_path)
    order = [name for name in BENCHMARKS if f"{name}[:1]" in parts]
    assert list(line)[2:] == [*(f"{name}[:1]" for name in order), "own[:1]", "Mean"]


def test_samples_are_table_a2s_unless_given():
    from kv4rl.evaluation.benchmarks import BENCHMARKS, ProblemSet

    own = ProblemSet("own", "own", "here", None, ())
    aime = ProblemSet("aime24", "AIME24", "here", BENCHMARKS["aime24"], ())
    assert [EvaluationSettings("m").samples_of(entry) for entry in (own, aime)] == [8, 32]
    assert EvaluationSettings("m", samples=2).samples_of(aime) == 2
    assert EvaluationSettings("m").seeds == (42, 43, 44)


@pytest.mark.slow
@pytest.mark.skipif(not (MODELS_DIR / "smollm2-135m").is_dir(), reason="python -m kv4rl.model.fetch smollm2")
def test_a_chat_model_answers_word_problems(tmp_path, monkeypatch):
    settings = EvaluationSettings("smollm2-135m", samples=1, max_response_tokens=24, chat=True, limit=2, device="cpu")
    from kv4rl.evaluation.benchmarks import load_sets

    (problems,) = load_sets([str(WORDS)])
    with Grader(workers=1) as grader:
        evaluator = Evaluator(settings, grader)
        evaluator.check([problems])
        result = evaluator.run(problems, 43, tmp_path / "seed43.jsonl")
    assert result.verl.shape == (2, 1) and (result.response_tokens <= 24).all() and result.grading_failures == 0


def test_a_runs_exported_policy_is_called_after_the_run():
    names = ("mini-qwen3", "runs/kv8/model", "Qwen/Qwen3-4B-Base", "model")
    assert [model_name(name) for name in names] == ["mini-qwen3", "kv8/model", "Qwen3-4B-Base", "model"]
