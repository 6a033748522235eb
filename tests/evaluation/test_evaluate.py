"""Evaluation over a scripted engine, hand-computed; and over the real engine on a tiny model."""

from dataclasses import dataclass

import numpy as np
import pytest

from kv4rl.engine.sampler import Sampling
from kv4rl.evaluation import evaluate
from kv4rl.rewards import Grader


@dataclass(frozen=True)
class Problem:
    prompt_id: str
    tokens: list
    answer: str


@dataclass(frozen=True)
class Response:
    tokens: list
    finish_reason: str


class Letters:
    """Token = character code; 0 is a special token."""

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(token) for token in tokens if token)


class ScriptedEngine:
    """Answers as told, and remembers how it was asked."""

    def __init__(self, script):
        self.script = script

    def generate(self, prompts, sampling, *, prompt_ids, samples):
        self.asked = (prompts, sampling, prompt_ids, samples)
        return [Response([*map(ord, text), 0], reason) for text, reason in self.script]


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=1) as pool:
        yield pool


PROBLEMS = [Problem("a", [1, 2], "58"), Problem("b", [3], "7"), Problem("c", [4], "9")]
SCRIPT = [
    ("\\boxed{58}", "eos"), ("so 58", "length"),
    ("\\boxed{8}", "eos"), ("", "length"),
    ("9 or so \\boxed{9}", "eos"), ("\\boxed{10}", "eos"),
]  # fmt: skip


def test_scores_are_those_worked_out_by_hand(grader):
    sampling = Sampling(temperature=0.6, top_p=0.95, seed=42)
    engine = ScriptedEngine(SCRIPT)
    result = evaluate(engine, Letters(), PROBLEMS, samples=2, sampling=sampling, grader=grader)
    assert engine.asked == ([[1, 2], [3], [4]], sampling, ["a", "b", "c"], 2)
    assert result.verl.tolist() == [[1, 1], [0, 0], [1, 0]]
    assert result.last_box.tolist() == [[1, 0], [0, 0], [1, 0]]
    assert (result.avg_at_k(), result.avg_at_k("last_box")) == (3 / 6, 2 / 6)
    assert result.pass_at_k() == result.pass_at_k("last_box") == 2 / 3
    assert result.response_tokens.tolist() == [[11, 6], [10, 1], [18, 11]]
    metrics = result.metrics()
    assert metrics["val/response_length/clip_ratio"] == 2 / 6
    assert metrics["val/correct_without_box"] == metrics["val/correct_truncated"] == 1 / 6
    assert metrics["val/grading_failures"] == 0


def test_accuracy_comes_with_an_interval_over_questions(grader):
    result = evaluate(ScriptedEngine(SCRIPT), Letters(), PROBLEMS, samples=2, sampling=Sampling(), grader=grader)
    row = result.accuracy()
    assert row["value"] == 0.5 and row["n"] == 6
    assert (row["low"], row["high"]) == (0.0, 1.0)  # three questions with means 1, 0, 1/2
    assert result.accuracy() == row


@pytest.mark.parametrize(("problems", "samples", "field"), [([], 1, "problems"), (PROBLEMS, 0, "samples")])
def test_nothing_to_evaluate_is_refused(grader, problems, samples, field):
    with pytest.raises(ValueError, match=field):
        evaluate(ScriptedEngine([]), Letters(), problems, samples=samples, sampling=Sampling(), grader=grader)


def test_an_unknown_reading_is_refused(grader):
    result = evaluate(ScriptedEngine(SCRIPT), Letters(), PROBLEMS, samples=2, sampling=Sampling(), grader=grader)
    with pytest.raises(ValueError, match="reading='boxed'"):
        result.correct("boxed")


def test_a_real_engine_is_evaluated_and_repeats_itself(grader, tiny_decoder):
    from kv4rl.config import KVConfig, RolloutConfig
    from kv4rl.engine.engine import RolloutEngine

    rollout = RolloutConfig(max_response_tokens=12, max_active_requests=4, cache_pages=64)
    engine = RolloutEngine(tiny_decoder, KVConfig("bf16"), rollout, eos_token_ids=(0,))
    problems = [Problem(str(i), [40 + i, 50], "1") for i in range(3)]
    first, again = (
        evaluate(engine, Letters(), problems, samples=2, sampling=Sampling(seed=1), grader=grader) for _ in range(2)
    )
    assert first.verl.shape == (3, 2)
    assert (first.response_tokens <= 12).all()
    assert np.array_equal(first.response_tokens, again.response_tokens)
    engine.check_drained()
