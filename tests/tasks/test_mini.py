"""The mini task: hand-worked problems, splits, length law, slips and the verdict on a worked solution."""

import random
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.rewards.readings import check_gold
from kv4rl.tasks.mini import MiniProblem, draw_problem, first_error, write_solution

PROBLEM = MiniProblem(last=8, probe=2, divisor=2, start=(12, 45, 78, 3))
SOLUTION = "05:45>48;06:78>26;07:78>04;08:03>07;=45\\boxed{52}"


@st.composite
def problems(draw):
    return draw_problem(random.Random(draw(st.integers(0, 2**32))), draw(st.sampled_from(["train", "evaluation"])))


def test_a_hand_worked_problem():
    assert PROBLEM.prompt == "n=08 k=02 r=2 x=12,45,78,03\n"
    assert write_solution(PROBLEM) == SOLUTION
    assert PROBLEM.answer == "52"


def test_a_divisor_of_three_looks_two_thirds_back():
    problem = MiniProblem(last=6, probe=5, divisor=3, start=(12, 45, 78, 3))
    assert write_solution(problem) == "05:12>15;06:45>60;=15\\boxed{75}"


@settings(deadline=None, max_examples=100)
@given(problems())
def test_a_worked_solution_is_right_and_ends_on_the_answer(problem):
    solution = write_solution(problem)
    assert first_error(problem, solution) == "none"
    assert int(re.findall(r"\\boxed\{(\d\d)\}", solution)[-1]) == int(problem.answer)
    assert solution.count(";") == problem.steps


def test_a_gold_answer_is_one_the_grader_can_read():
    for seed in range(20):
        check_gold(draw_problem(random.Random(seed)).answer)


def test_leading_zeros_in_the_box_do_not_matter():
    from kv4rl.rewards.grader import Grader

    with Grader(workers=1) as grader:
        verdicts = grader.grade_many(
            [("=02\\boxed{07}", "7"), ("=02\\boxed{00}", "0"), (SOLUTION, "52"), (SOLUTION, "2")]
        )
    assert [verdict.verl for verdict in verdicts] == [1, 1, 1, 0]
    assert [verdict.last_box for verdict in verdicts] == [1, 1, 1, 0]


def test_the_splits_share_no_prompt():
    rng = random.Random(0)
    seen = {split: {draw_problem(rng, split).prompt for _ in range(500)} for split in ("train", "evaluation")}
    assert not seen["train"] & seen["evaluation"]


def test_solution_lengths_are_heavy_tailed():
    rng = random.Random(1)
    # Characters less the five that the box's opening shares one token with, plus the end of sequence.
    tokens = [len(write_solution(draw_problem(rng))) - 6 + 1 for _ in range(20_000)]
    median, p99 = np.percentile(tokens, [50, 99])
    assert p99 >= 5 * median
    assert max(tokens) <= 900


def test_every_step_reads_a_value_written_far_back():
    """At the median of response tokens the value looked back at is more than 128 tokens away in long responses."""
    distances = [9 * (index - index // divisor) for index in range(40, 100) for divisor in (2, 3)]
    assert min(distances) > 128


def test_slips_come_at_their_rate_and_are_followed_consistently():
    rng = random.Random(2)
    kinds, steps = Counter(), 0
    for _ in range(4000):
        problem = draw_problem(rng)
        kinds[first_error(problem, write_solution(problem, 0.05, rng))] += 1
        steps += problem.steps + 1
    survived = kinds["none"] / 4000
    rng = random.Random(2)
    expected = np.mean([0.95 ** (draw_problem(rng).steps + 1) for _ in range(4000)])
    # Some slips change nothing (a wrong digit that is the right one): about one in seven.
    assert expected < survived < expected + 0.08
    assert set(kinds) == {"none", "look_back", "arithmetic", "answer_look_back", "answer_sum"}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("06:78>26", "06:45>93"), "look_back"),
        (("06:78>26", "06:78>27"), "arithmetic"),
        (("=45\\boxed{52}", "=12\\boxed{19}"), "answer_look_back"),
        (("=45\\boxed{52}", "=45\\boxed{53}"), "answer_sum"),
        (("07:", "08:"), "index"),
        (("08:03>07;", ""), "index"),
        (("=45", "09:03>10;=45"), "index"),
        (("\\boxed{52}", ""), "format"),
        (("07:78>04;08:03>07;=45\\boxed{52}", "07:7"), "format"),
        (("\\boxed{52}", "\\boxed{52}5"), "format"),
    ],
)
def test_the_first_error_is_named(change, kind):
    assert first_error(PROBLEM, SOLUTION.replace(*change)) == kind


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("last", 4),
        ("last", 100),
        ("probe", 0),
        ("probe", 8),
        ("divisor", 1),
        ("start", (1, 2, 3)),
        ("start", (1, 2, 3, 100)),
    ],
)
def test_a_wrong_field_is_named(field, value):
    good = {"last": 8, "probe": 2, "divisor": 2, "start": (12, 45, 78, 3)}
    with pytest.raises(ValueError, match=field):
        MiniProblem(**good | {field: value})


def test_slips_need_a_generator_and_a_probability():
    with pytest.raises(ValueError, match="rng"):
        write_solution(PROBLEM, 0.1)
    with pytest.raises(ValueError, match="slip_rate"):
        write_solution(PROBLEM, 1.0, random.Random(0))
