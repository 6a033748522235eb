"""The six sets of Table A2, by hub name or from local files, as problems with one kind of gold each (§B.2).

| set | gold |
|---|---|
| MATH-500, AIME 2024/2025, AMC 2023 | a string, compared by Math-Verify as verl does |
| OlympiadBench | a `Gold`: every answer of the row's list, the row's absolute tolerance or 1e-8 |
| MinervaMath | a `Gold`: relative tolerance 1e-4, in the units that the question asks for |
| any other file | a string; from GSM8K's format the part after `####` |

The hub's data sets and copies of them name their fields differently (`Problem`, `question`, an `answer` that a
`solution` boxes, 27.0 for 27); what matters is read from whichever is there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kv4rl.config import require
from kv4rl.paper import EVALUATION_TASKS
from kv4rl.rewards import Gold
from kv4rl.rewards.answers import split_list, tidy
from kv4rl.rewards.boxes import last_box
from kv4rl.tasks.instruction import with_instruction
from kv4rl.tasks.rows import SUFFIXES, field, read_file, read_hub

ABSOLUTE = 1e-8  # of OlympiadBench's numbers without a tolerance of their own (§B.2)
RELATIVE = 1e-4  # of MinervaMath's numbers (§B.2)


@dataclass(frozen=True)
class Benchmark:
    """One row of Table A2; `title` is the set's column in Tables 1 and A5."""

    name: str
    title: str
    hub: str
    split: str
    questions: int
    samples: int  # k of avg@k and pass@k
    periodic: bool  # evaluated during training too
    aliases: tuple[str, ...]  # what a file that holds it may be called, letters and digits only


# Titles of Tables 1 and A5, the hub's split, and other names that files of the set have.
_SETS = {
    "math500": ("MATH-500", "test", ()),
    "olympiad": ("Olympiad", "test", ("olympiadbench",)),
    "minerva": ("Minerva", "test", ("minervamath",)),
    "aime24": ("AIME24", "train", ("aime2024",)),
    "aime25": ("AIME25", "train", ("aime2025",)),
    "amc23": ("AMC23", "test", ("amc2023",)),
}


def _benchmark(name: str, title: str, split: str, aliases: tuple[str, ...]) -> Benchmark:
    questions, samples, periodic, hub = EVALUATION_TASKS[name]
    return Benchmark(name, title, hub, split, questions, samples, periodic, (name, *aliases))


BENCHMARKS = {name: _benchmark(name, *entry) for name, entry in _SETS.items()}
"""In the order of Table 1's columns."""


@dataclass(frozen=True)
class Problem:
    """One question: the whole text of its prompt, and what the grader compares with."""

    problem_id: str
    text: str
    answer: str | Gold


@dataclass(frozen=True)
class ProblemSet:
    """A set that was read: `benchmark` is None for a file that is none of the six."""

    name: str
    title: str
    source: str
    benchmark: Benchmark | None
    problems: tuple[Problem, ...]


def benchmark_of(name: str) -> Benchmark | None:
    """The set that a name or a file's stem names, whatever its case and punctuation; None if it is none of the six."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((entry for entry in BENCHMARKS.values() if plain in entry.aliases), None)


def load_sets(given: Sequence[str], *, flag: str = "--sets") -> list[ProblemSet]:
    """Sets from what a command line names: `math500` (the hub), `math500=FILE`, `FILE`, `DIRECTORY` (its files of the
    six) or `all` (the six, from the hub).

    Raises `InputError` for an unknown set or a file without the needed fields, ConnectionError if the hub fails; that
    says what to give with `flag` instead.
    """
    sets = [part for entry in given for part in _load_given(entry, flag)]
    names = [part.name for part in sets]
    require(len(set(names)) == len(names), "sets", names, "each set once")
    require(bool(sets), "sets", list(given), f"at least one of {', '.join(BENCHMARKS)}, all, or files")
    return sets


def _load_given(entry: str, flag: str) -> list[ProblemSet]:
    if entry == "all":
        return [load_benchmark(name, flag=flag) for name in BENCHMARKS]
    name, _, file = entry.rpartition("=")
    if name:
        return [load_benchmark(name, file)]
    path = Path(entry)
    if path.is_dir():
        return [load_benchmark(name, file) for name, file in benchmark_files(path).items()]
    if path.suffix in SUFFIXES:
        return [_load_file(path)]
    return [load_benchmark(entry, flag=flag)]


def benchmark_files(directory: Path) -> dict[str, Path]:
    """The six sets' files in a directory, by set name; `InputError` if there is none."""
    files = [path for path in sorted(directory.iterdir()) if path.suffix in SUFFIXES]
    found = {entry.name: path for path in files if (entry := benchmark_of(path.stem))}
    require(bool(found), "sets", str(directory), f"a directory with files such as {', '.join(BENCHMARKS)}.jsonl")
    return {name: found[name] for name in BENCHMARKS if name in found}


def load_benchmark(name: str, file: str | Path | None = None, *, flag: str = "--sets") -> ProblemSet:
    """One of the six sets, from a local file or from the hub."""
    entry = benchmark_of(name)
    known = f"one of {', '.join(BENCHMARKS)} (or all, a .jsonl or .parquet file, or a directory of them)"
    require(entry is not None, "set", name, known)
    if file is None:
        instead = f"pass {flag} {entry.name}=FILE with a local .jsonl or .parquet of the same fields"
        rows, source = read_hub(entry.hub, split=entry.split, instead=instead), entry.hub
    else:
        rows, source = read_file(file), str(file)
    return ProblemSet(entry.name, entry.title, source, entry, _problems(rows, entry.name))


def _load_file(path: Path) -> ProblemSet:
    entry = benchmark_of(path.stem)
    if entry is not None:
        return load_benchmark(entry.name, path)
    return ProblemSet(path.stem, path.stem, str(path), None, _problems(read_file(path), path.stem))


def _problems(rows: Sequence[tuple[str, dict]], name: str) -> tuple[Problem, ...]:
    return tuple(_problem(row, name, where, number) for number, (where, row) in enumerate(rows, start=1))


def _problem(row: Mapping, name: str, where: str, number: int) -> Problem:
    """One row; `problem` and `question` get the instruction, a task file's `prompt` is a whole prompt already."""
    question, whole = field(row, ("problem", "question")), field(row, ("prompt",))
    text = question if question is not None else whole
    named = "`problem` or `question` (or a whole `prompt`)"
    require(isinstance(text, str) and bool(text.strip()), f"{where} fields", sorted(row), f"also {named}, a text")
    context = field(row, ("context",)) if name == "olympiad" else None
    if context:
        text = f"{context}\n{text}"
    gold = _GOLDS.get(name, _plain_gold)(row, where)
    # The id keys the sampling noise, so it must not depend on where the rows come from.
    return Problem(f"{name}-{number}", with_instruction(text) if question is not None else text, gold)


def _answer(row: Mapping, where: str, names: Sequence[str] = ("answer",)) -> object:
    answer = field(row, names)
    if answer is None and isinstance(solution := field(row, ("solution",)), str):
        answer = last_box(solution)
    require(answer not in (None, "", []), f"{where} fields", sorted(row), f"also {names[0]}, or a boxed `solution`")
    return answer


def _plain_gold(row: Mapping, where: str) -> str:
    given = _answer(row, where)
    # The text of a list or an object is no answer: every response would be marked wrong, silently.
    plain = isinstance(given, str | int | float) and not isinstance(given, bool)
    require(plain, f"{where} answer", given, "a text or a number")
    answer = str(given).rpartition("####")[2].strip()
    require(bool(answer), f"{where} answer", answer, "an answer after ####")
    whole = re.fullmatch(r"(-?)0*(\d+)(?:\.0+)?", answer)  # 27.0 and 025: integers of sets that store them so
    return f"{whole[1]}{whole[2]}" if whole else answer


def _olympiad_gold(row: Mapping, where: str) -> Gold:
    answer = _answer(row, where, ("final_answer", "answer"))
    answers = [part for item in _listed(answer) for part in split_list(tidy(item))]
    if field(row, ("answer_type",)) == "Interval":
        answers = [re.sub(r"^[A-Za-z]\s*(?=[(\[])", "", part) for part in answers]  # t(0,4]: t is the variable
    if field(row, ("unit",)) == "%":
        answers = [f"{part}\\%" for part in answers]
    return Gold(tuple(answers), absolute=_tolerance(field(row, ("error",)), where))


def _listed(answer: object) -> list[str]:
    """A list of strings: as it is, from its JSON, or of one string."""
    if isinstance(answer, str) and answer.startswith("["):
        with suppress(json.JSONDecodeError):  # an interval such as [1, 2) begins as a list does
            answer = json.loads(answer)
    return [str(item) for item in answer] if isinstance(answer, list | tuple) else [str(answer)]


def _tolerance(error: object, where: str) -> float:
    if error in (None, ""):
        return ABSOLUTE
    try:
        return float(error)
    except (TypeError, ValueError):
        require(False, f"{where} error", error, "one number, the absolute tolerance")


def _minerva_gold(row: Mapping, where: str) -> Gold:
    return Gold(tuple(split_list(tidy(str(_answer(row, where))))), relative=RELATIVE)


_GOLDS = {"olympiad": _olympiad_gold, "minerva": _minerva_gold}
