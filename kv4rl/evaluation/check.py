"""The grader's self-check: every gold against itself must score 1, against the next row's gold 0 where they differ.

`python -m kv4rl.evaluation check --sets DIRECTORY_OR_FILES`

Under both readings. Golds with a tolerance are also written out in digits (1) and moved by three tolerances (0), lists
given in reverse order (1) and with an answer left out (0). Beside the scores it says how each gold compares: as a
number, as a formula that Math-Verify parses, or only by its spelling. On copies of the six sets of Table A2 all of that
holds, and no gold compares by its spelling alone. What it lists there:

| set | what | why |
|---|---|---|
| MATH-500 | row 23 scores 1 against row 24 | the golds are a number and `x =` the same number: the same answer |
| OlympiadBench | 675 rows where Table A2 has 674 | the copy in public repositories has one more than the hub's |

What correct grading would accept and this does not, seen when golds of those sets were rewritten:

| set | what | why |
|---|---|---|
| MATH-500 | `6+9i` and `6 + 9 i` differ, as does `9i` first | Math-Verify takes i for a variable in one of them |
| all | `\\log` where the gold has `\\ln` | Math-Verify reads `\\log` as base 10 |
| MinervaMath | the right quantity in another unit | §B.2: in the units that the question asks for |
| OlympiadBench | one conditioned answer (`where ...`) | only the formula is compared, not the condition in words |
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sympy import Expr, Rational

from kv4rl.evaluation.benchmarks import Problem, ProblemSet
from kv4rl.rewards import Gold, Grader, Verdict
from kv4rl.rewards.answers import assigned, tidy
from kv4rl.rewards.readings import parses
from kv4rl.rewards.rules import how, number

SHOWN = 60  # characters of a gold in an exception
DIGITS = 40  # of a number written out, beside those before its point
MOVED = 3  # tolerances


@dataclass(frozen=True)
class Exceptional:
    """One row that does not behave as it must, or not as one would think, and why; `wrong` asks for mending."""

    problem_id: str
    what: str
    gold: str
    why: str
    wrong: bool

    def __str__(self) -> str:
        return f"{self.problem_id}: {self.what}: {self.gold[:SHOWN]!r}: {self.why}"


@dataclass
class SetCheck:
    """What the check found in one set."""

    name: str
    rows: int
    expected_rows: int | None  # Table A2's, None for a set that is none of the six
    compared: Counter = field(default_factory=Counter)  # rows by number, formula, spelling
    itself: int = 0  # golds that score 1 against themselves
    numbers: int = 0  # answers with a tolerance, written out in digits and moved
    lists: int = 0  # golds of several answers
    differing: int = 0  # rows whose next row has another gold
    rejected: int = 0  # of those, how many score 0
    exceptions: list[Exceptional] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not any(exception.wrong for exception in self.exceptions)


def check_set(problems: ProblemSet, grader: Grader) -> SetCheck:
    """Grade the golds of a set against themselves and their neighbours."""
    rows = problems.problems
    expected = problems.benchmark.questions if problems.benchmark else None
    result = SetCheck(problems.name, len(rows), expected)
    _check_kinds(rows, result)
    _check_itself(rows, grader, result)
    _check_next(rows, grader, result)
    _check_numbers(rows, grader, result)
    _check_lists(rows, grader, result)
    return result


def response(answer: str) -> str:
    """A response that gives `answer`."""
    return f"We work it out, and so the final answer is $\\boxed{{{answer}}}$."


def _scores(verdict: Verdict) -> tuple[float, float]:
    return verdict.verl, verdict.last_box


def _check_kinds(rows: Sequence[Problem], result: SetCheck) -> None:
    for row in rows:
        if isinstance(row.answer, Gold):
            kinds = {how(answer) for answer in row.answer.answers}
            kind = next(kind for kind in ("spelling", "formula", "number") if kind in kinds)
        else:
            kind = "formula" if parses(row.answer) else "spelling"
            kind = "number" if kind == "formula" and how(row.answer) == "number" else kind
        result.compared[kind] += 1
        if kind == "spelling":
            why = "Math-Verify does not parse it, so only the same spelling scores"
            result.exceptions.append(Exceptional(row.problem_id, "spelling", str(row.answer), why, wrong=False))


def _check_itself(rows: Sequence[Problem], grader: Grader, result: SetCheck) -> None:
    before = len(result.exceptions)
    _expect("itself", [(row, str(row.answer), row.answer) for row in rows], 1.0, grader, result)
    result.itself = len(rows) - (len(result.exceptions) - before)


def _check_next(rows: Sequence[Problem], grader: Grader, result: SetCheck) -> None:
    pairs = [(row, other) for row, other in zip(rows, [*rows[1:], rows[0]], strict=True) if _differ(row, other)]
    verdicts = grader.grade_many([(response(str(other.answer)), row.answer) for row, other in pairs])
    back = grader.grade_many([(response(str(row.answer)), other.answer) for row, other in pairs])
    result.differing = len(pairs)
    for (row, other), verdict, reverse in zip(pairs, verdicts, back, strict=True):
        if _scores(verdict) == (0.0, 0.0):
            result.rejected += 1
            continue
        same = _scores(verdict) == _scores(reverse) == (1.0, 1.0)
        why = "the same answer, spelt differently" if same else f"scores {_scores(verdict)} against another answer"
        golds = f"{row.answer} and {other.answer}"
        result.exceptions.append(Exceptional(row.problem_id, "next row", golds, why, wrong=not same))


def _check_numbers(rows: Sequence[Problem], grader: Grader, result: SetCheck) -> None:
    written, moved = [], []
    for row in rows:
        for answer in row.answer.answers if isinstance(row.answer, Gold) else ():
            value = number(assigned(tidy(answer)))
            if value is not None and value[0].is_real:
                alone = replace(row.answer, answers=(answer,))
                written.append((row, _digits(value[0]), alone))
                moved.append((row, _digits(value[0] + MOVED * _tolerance(value[0], alone)), alone))
    result.numbers = len(written)
    _expect("in digits", written, 1.0, grader, result)
    # Nothing is left of a relative tolerance where the gold is 0.
    _expect(
        "moved by three tolerances",
        [m for m, w in zip(moved, written, strict=True) if m[1] != w[1]],
        0.0,
        grader,
        result,
    )


def _tolerance(value: Expr, gold: Gold) -> Expr:
    return Rational(str(gold.absolute or 0)) if gold.relative is None else abs(value) * Rational(str(gold.relative))


def _digits(value: Expr) -> str:
    digits = DIGITS + len(str(int(abs(value))))
    return str(value) if value.is_Integer else str(value.evalf(digits)).replace("e+", "e")


def _check_lists(rows: Sequence[Problem], grader: Grader, result: SetCheck) -> None:
    lists = [(row, row.answer.answers) for row in rows if isinstance(row.answer, Gold) and len(row.answer.answers) > 1]
    result.lists = len(lists)
    _expect("reversed", [(row, ", ".join(reversed(all_)), row.answer) for row, all_ in lists], 1.0, grader, result)
    _expect("one short", [(row, ", ".join(all_[1:]), row.answer) for row, all_ in lists], 0.0, grader, result)


def _expect(what: str, items: Sequence[tuple], wanted: float, grader: Grader, result: SetCheck) -> None:
    """Each (row, answer, gold) must score `wanted` under both readings."""
    verdicts = grader.grade_many([(response(answer), gold) for _, answer, gold in items])
    for (row, answer, gold), verdict in zip(items, verdicts, strict=True):
        if _scores(verdict) != (wanted, wanted):
            why = verdict.error or f"{answer[:SHOWN]} scores {_scores(verdict)} (verl, last_box)"
            result.exceptions.append(Exceptional(row.problem_id, what, str(gold), why, wrong=True))


def _differ(row: Problem, other: Problem) -> bool:
    return tidy(str(row.answer)) != tidy(str(other.answer))


HEADER = (
    f"{'set':<16}{'rows':>6}{'number':>8}{'formula':>9}{'spelling':>10}{'in digits':>11}{'lists':>7}"
    f"{'itself = 1':>12}{'next differs':>14}{'next = 0':>10}"
)


def format_check(check: SetCheck) -> str:
    """A set's counts under `HEADER`, then its exceptions."""
    kinds = check.compared
    lines = [
        f"{check.name:<16}{check.rows:>6}{kinds['number']:>8}{kinds['formula']:>9}{kinds['spelling']:>10}"
        f"{check.numbers:>11}{check.lists:>7}{check.itself:>12}{check.differing:>14}{check.rejected:>10}"
    ]
    if check.expected_rows not in (None, check.rows):
        lines.append(f"{check.name}: {check.rows} rows, Table A2 has {check.expected_rows}")
    lines += [f"{'WRONG ' if entry.wrong else ''}{entry}" for entry in check.exceptions]
    return "\n".join(lines)
