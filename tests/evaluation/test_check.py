"""The self-check on small sets of our own: what it counts, lists and calls wrong."""

import json

import pytest

from kv4rl.evaluation.__main__ import main
from kv4rl.evaluation.benchmarks import Problem, ProblemSet
from kv4rl.evaluation.check import check_set, format_check
from kv4rl.rewards import Gold, Grader, Verdict


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=1) as pool:
        yield pool


def own_set(*golds):
    return ProblemSet("own", "own", "here", None, tuple(Problem(f"own-{i}", "?", gold) for i, gold in enumerate(golds)))


def test_a_sound_set_passes_and_is_counted(grader):
    golds = [Gold(("2", "\\sqrt{3}"), absolute=1e-8), Gold(("4e-7",), relative=1e-4), Gold(("a b^2",), relative=1e-4)]
    check = check_set(own_set(*golds), grader)
    assert check.passed and check.exceptions == []
    assert (check.itself, check.differing, check.rejected, check.lists, check.numbers) == (3, 3, 3, 1, 3)
    assert check.compared == {"number": 2, "formula": 1}


def test_equal_answers_in_a_row_are_listed_and_explained(grader):
    check = check_set(own_set("5", "x=5", "\\frac{1}{2}"), grader)
    assert check.passed and check.rejected == 2
    (listed,) = check.exceptions
    assert listed.problem_id == "own-0" and "the same answer, spelt differently" in str(listed)


def test_a_gold_that_only_its_spelling_matches_is_listed(grader):
    check = check_set(own_set("\\mho \\notin", "8"), grader)
    assert check.passed and check.compared["spelling"] == 1
    assert "only the same spelling scores" in str(check.exceptions[0])


class Scripted:
    """A grader that says 1 where `right(text, gold)` holds."""

    def __init__(self, right):
        self.right = right

    def grade_many(self, items):
        return [Verdict(score, score, True) for score in (float(self.right(*item)) for item in items)]


def test_a_gold_that_does_not_equal_itself_is_wrong():
    check = check_set(own_set(Gold(("1", "2"), absolute=1e-8), "8"), Scripted(lambda text, gold: False))
    assert not check.passed and check.itself == 0
    assert [entry.what for entry in check.exceptions] == ["itself"] * 2 + ["in digits"] * 2 + ["reversed"]
    assert format_check(check).count("WRONG own-") == 5


def test_an_answer_taken_for_another_is_wrong():
    check = check_set(own_set("7", "8"), Scripted(lambda text, gold: gold == "7" or "8" in text))
    assert [(entry.what, entry.gold, entry.wrong) for entry in check.exceptions] == [("next row", "7 and 8", True)]


def test_a_tolerance_that_lets_others_in_is_wrong():
    check = check_set(own_set(Gold(("3",), absolute=0.5)), Scripted(lambda text, gold: True))
    assert [(entry.what, entry.wrong) for entry in check.exceptions] == [("moved by three tolerances", True)]


def test_the_command_prints_counts_and_ends_well(tmp_path, capsys):
    path = tmp_path / "minerva_math.jsonl"
    rows = [{"problem": "?", "solution": f"\\boxed{{{gold}}}"} for gold in ("2.5e11", "\\frac{a}{b}")]
    path.write_text("\n".join(map(json.dumps, rows)))
    main(["check", "--sets", str(path), "--workers", "1"])
    out = capsys.readouterr().out.splitlines()
    assert out[1].split()[:6] == ["minerva", "2", "1", "1", "0", "1"]
    assert out[2] == "minerva: 2 rows, Table A2 has 272"


def test_the_command_refuses_what_it_cannot_check(capsys):
    with pytest.raises(SystemExit) as ending:
        main(["check", "--sets", "gsm"])
    assert ending.value.code == 2 and "set='gsm': expected one of math500" in capsys.readouterr().err
