"""Both readings: the table of decisions, equality with verl's own flow, and the last balanced box."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from kv4rl.rewards import Grader
from kv4rl.rewards.boxes import last_box
from kv4rl.rewards.cases import CASES
from kv4rl.rewards.readings import verl_reading


@pytest.fixture(scope="module")
def verdicts():
    with Grader(workers=2) as grader:
        scores = grader.grade_many([(case.response, case.gold) for case in CASES])
        return {case.name: verdict for case, verdict in zip(CASES, scores, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_each_case_scores_as_decided(verdicts, case):
    verdict = verdicts[case.name]
    assert (verdict.verl, verdict.last_box) == (case.verl, case.last_box), case.decision
    assert verdict.error is None


def test_the_log_flags_name_the_boxless_correct_answers(verdicts):
    flagged = {name for name, verdict in verdicts.items() if verdict.correct_without_box}
    assert flagged == {
        "cut off while trying values", "answer without a box", "nothing but the number", "box without braces",
    }  # fmt: skip


def verl_flow(text, gold):
    """verl's flow with Math-Verify's own defaults, as a peer for ours (which turns its alarms off)."""
    golds = parse("\\boxed{" + gold + "}", (LatexExtractionConfig(),))
    predictions = parse(text, (ExprExtractionConfig(), LatexExtractionConfig()))
    return any(verify(g, p) for p in predictions for g in golds)


PIECES = st.sampled_from(
    ["58", "57", "-3", "0.5", "\\frac{1}{2}", "1/2", "\\boxed{58}", "\\boxed{57}", "\\boxed{", "}", "$", "\\[", "\\]",
     "\n\n", " the answer is ", " final answer is ", " so ", "x = ", ", ", " and ", "%", ". "]
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(["58", "\\frac{1}{2}", "57,58", "x=58"]))
def test_the_verl_reading_equals_verls_flow(text, gold):
    assert verl_reading(text, gold) == verl_flow(text, gold)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_verl_reading_equals_verls_flow_on_the_table(case):
    assert verl_reading(case.response, case.gold) == verl_flow(case.response, case.gold)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("no box", None),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed{a \\boxed{b} c}", "b"),
        ("} \\boxed {7}", "7"),
        ("\\boxed{}", ""),
        ("\\boxed 7", None),
    ],
)
def test_the_last_balanced_box_is_found(text, content):
    assert last_box(text) == content


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="ab{}\\", max_size=20), st.text(alphabet="12+x", max_size=8))
def test_a_box_at_the_end_is_the_last_one(noise, content):
    if not noise.endswith("\\"):
        assert last_box(noise + "\\boxed{" + content + "}") == content
