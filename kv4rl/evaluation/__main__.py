"""Evaluate a model by the protocol of §B.2, or check the grader on the golds of its sets.

    python -m kv4rl.evaluation --model DIR --sets math500 aime24 --seeds 42 43 44
    python -m kv4rl.evaluation --model DIR --sets all --save
    python -m kv4rl.evaluation --model mini-qwen3 --sets data/tasks/mini-evaluation.jsonl --max-response-tokens 1024
    python -m kv4rl.evaluation check --sets DIRECTORY_OR_FILES

A set is a NAME of Table A2 (from the hub), NAME=FILE, any other .jsonl or .parquet FILE, a directory of the six sets'
files, or "all"; NAME is math500, olympiad, minerva, aime24, aime25 or amc23. Run again after a kill, the same command
continues. Rows go into OUTPUT/evaluation.csv and, with --save, into data/results/evaluation.csv.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from kv4rl.cli import one_sentence
from kv4rl.config import InputError, require
from kv4rl.disk import NotWritten, writing
from kv4rl.evaluation.benchmarks import BENCHMARKS, ProblemSet, load_sets
from kv4rl.evaluation.check import HEADER, check_set, format_check
from kv4rl.evaluation.evaluate import EvaluationResult
from kv4rl.evaluation.report import FILE, METRICS, evaluation_rows, format_table, table
from kv4rl.evaluation.run import EvaluationSettings, Evaluator, record_path
from kv4rl.results import COLUMNS, RESULTS, read_rows, write_rows
from kv4rl.rewards import Grader

PROGRAM = "python -m kv4rl.evaluation"
CHECK_TIMEOUT_S = 120.0  # for one gold: they are trusted data, and the machine may be busy


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    default = EvaluationSettings(model="-")
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="a directory, a name under data/models, or a hub id")
    parser.add_argument("--sets", nargs="+", required=True, help="NAME, NAME=FILE, FILE, a directory or all; see above")
    parser.add_argument("--samples", type=int, help="k of avg@k and pass@k; default Table A2's, 8 for other sets")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(default.seeds))
    parser.add_argument("--output", type=Path, help="where finished problems are kept; default runs/evaluation/ARM")
    parser.add_argument("--arm", help="the checkpoint's name in rows and tables; default the model directory's name")
    parser.add_argument("--reading", choices=("verl", "last_box"), default="verl", help="whose scores are reported")
    parser.add_argument("--temperature", type=float, default=default.temperature)
    parser.add_argument("--top-p", type=float, default=default.top_p)
    parser.add_argument("--max-prompt-tokens", type=int, default=default.max_prompt_tokens)
    parser.add_argument("--max-response-tokens", type=int, default=default.max_response_tokens)
    parser.add_argument("--max-active-requests", type=int, default=default.max_active_requests)
    parser.add_argument("--cache-pages", type=int, help="pages of 16 tokens; default what the memory holds")
    parser.add_argument("--chat", action="store_true", help="ask through the tokenizer's chat template")
    parser.add_argument("--limit", type=int, help="only the first problems of each set")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--workers", type=int, default=2, help="grading processes")
    parser.add_argument("--save", action="store_true", help=f"write the rows into data/results/{FILE} as well")
    return parser.parse_args(words)


def settings_of(given: argparse.Namespace) -> EvaluationSettings:
    """The flags that decide how the model is judged."""
    names = (
        "model", "samples", "temperature", "top_p", "max_prompt_tokens", "max_response_tokens",
        "max_active_requests", "cache_pages", "chat", "limit", "device",
    )  # fmt: skip
    return EvaluationSettings(seeds=tuple(given.seeds), **{name: getattr(given, name) for name in names})


def evaluate_sets(
    evaluator: Evaluator, sets: Sequence[ProblemSet], output: Path, reading: str
) -> dict[int, dict[str, EvaluationResult]]:
    """Seed -> set -> result, resumed from and recorded in `output`; a line of scores for each."""
    settings = evaluator.settings
    cut = "" if settings.limit is None else f"[:{settings.limit}]"
    results: dict[int, dict[str, EvaluationResult]] = {}
    for seed in settings.seeds:
        for problems in sets:
            result = evaluator.run(problems, seed, record_path(output, problems, seed))
            results.setdefault(seed, {})[problems.name + cut] = result
            scores = result.metrics(reading) | {"val/last_box": result.avg_at_k("last_box")}
            k = result.verl.shape[1]
            print(
                f"{problems.title} seed {seed}: avg@{k} {scores['val/avg_at_k']:.4f}, "
                f"pass@{k} {scores['val/pass_at_k']:.4f}, last box {scores['val/last_box']:.4f}, "
                f"{scores['val/response_length/mean']:.0f} tokens, {scores['val/response_length/clip_ratio']:.1%} cut "
                f"off, {scores['val/grading_failures']:.0f} grading failures",
                flush=True,
            )
    return results


def run(words: Sequence[str]) -> None:
    """Evaluate, write rows, print Table 1 and Table A5 of what was evaluated."""
    given = parse_arguments(words)
    arm = given.arm or Path(given.model).name
    output = given.output or Path("runs/evaluation") / arm
    named = arm if given.reading == "verl" else f"{arm} ({given.reading})"
    with one_sentence(PROGRAM):
        settings = settings_of(given)
        require(given.workers >= 1, "workers", given.workers, "an integer >= 1")
        sets = load_sets(given.sets)
        output.mkdir(parents=True, exist_ok=True)
        files = [output.resolve() / FILE] + ([RESULTS / FILE] if given.save else [])
        for file in files:
            require_rows_file(file)
        with Grader(workers=given.workers) as grader:
            evaluator = Evaluator(settings, grader)
            evaluator.check(sets)
            evaluator.check_records(sets, output)
            results = evaluate_sets(evaluator, sets, output, given.reading)
    rows = evaluation_rows(results, arm=named, model=model_name(given.model), reading=given.reading)
    with one_sentence(PROGRAM, kinds=(NotWritten,), status=1):
        for file in files:
            with writing(file):
                write_rows(file, rows)
    for metric in METRICS:
        print(f"\n{metric}, %")
        print(format_table(table(metric, directory=output)))
    print("\nrows in " + ", ".join(map(str, files)))


def require_rows_file(path: Path) -> None:
    """`InputError` if rows could not be added to `path`: it exists, and does not hold a results file's columns."""
    if not path.exists():
        return
    try:
        rows = read_rows(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"file={str(path)!r}: expected a results file or none ({error})") from error
    ours = all(row.keys() == set(COLUMNS) and None not in row.values() for row in rows)
    require(ours, "file", str(path), f"none, or a results file: {','.join(COLUMNS)}")


def model_name(given: str) -> str:
    """What rows call a model: its directory's name, with the run's before it where a run exported it to RUN/model."""
    path = Path(given)
    return f"{path.parent.name}/model" if path.name == "model" and path.parent.name else path.name


def check(words: Sequence[str]) -> None:
    """Grade golds against themselves and their neighbours; status 1 if one needs mending."""
    sets = f"files, directories, NAME or NAME=FILE, where NAME is one of {', '.join(BENCHMARKS)}"
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} check", description=check.__doc__, allow_abbrev=False)
    parser.add_argument("--sets", nargs="+", required=True, help=sets)
    parser.add_argument("--workers", type=int, default=2, help="grading processes")
    given = parser.parse_args(words)
    with one_sentence(f"{PROGRAM} check"):
        require(given.workers >= 1, "workers", given.workers, "an integer >= 1")
        sets = load_sets(given.sets)
    print(HEADER, flush=True)
    passed = True
    with Grader(workers=given.workers, timeout_s=CHECK_TIMEOUT_S) as grader:
        for problems in sets:  # minutes each: what is known is shown
            result = check_set(problems, grader)
            print(format_check(result), flush=True)
            passed = passed and result.passed
    if not passed:
        raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["check"]:
        check(words[1:])
    else:
        run(words)


if __name__ == "__main__":
    main()
