"""Evaluate a policy: k samples a question from an engine, graded, as avg@k and pass@k (§B.2).

The paper evaluates every policy with an unquantised cache in a common evaluator: pass an engine whose KV precision
is `bf16`, so that what was learnt is compared, not the sampler it is read through.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kv4rl.config import require
from kv4rl.engine.sampler import Sampling
from kv4rl.evaluation.metrics import avg_at_k, pass_at_k
from kv4rl.fidelity.bootstrap import mean_interval
from kv4rl.rewards import Gold, Grader, Verdict

PAPER_SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_response_tokens=16384)  # §B.2


class Problem(Protocol):
    """What a question must offer; `rollout.group.Prompt` does."""

    prompt_id: str
    tokens: list[int]
    answer: str | Gold


@dataclass(frozen=True)
class EvaluationResult:
    """Every graded sample; arrays are [questions, k], rows in the order of the problems."""

    verl: np.ndarray  # score 0 or 1 under each reading (design decision 10)
    last_box: np.ndarray
    has_box: np.ndarray  # bool
    truncated: np.ndarray  # bool: ended by the length cap
    response_tokens: np.ndarray  # int64, end-of-sequence token included
    grading_failures: int  # timeouts and worker deaths, all scored 0

    @classmethod
    def join(cls, parts: Sequence["EvaluationResult"]) -> "EvaluationResult":
        """The questions of all parts, which share k. Raises ValueError without a part."""
        require(len(parts) > 0, "parts", len(parts), "at least one result")
        arrays = ("verl", "last_box", "has_box", "truncated", "response_tokens")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays}
        return cls(**joined, grading_failures=sum(part.grading_failures for part in parts))

    def correct(self, reading: str = "verl") -> np.ndarray:
        """Scores [questions, k] under `reading`."""
        require(reading in ("verl", "last_box"), "reading", reading, "verl or last_box")
        return self.verl if reading == "verl" else self.last_box

    def avg_at_k(self, reading: str = "verl") -> float:
        """Fraction of samples that are correct."""
        return avg_at_k(self.correct(reading))

    def pass_at_k(self, reading: str = "verl") -> float:
        """Fraction of questions with a correct sample."""
        return pass_at_k(self.correct(reading))

    def accuracy(self, reading: str = "verl", *, seed: int = 0) -> dict[str, float]:
        """avg@k as the columns of a result row: value, 95 % interval over questions (bootstrap), n samples."""
        correct = self.correct(reading)
        low, high = mean_interval(correct.mean(axis=1), seed=seed)
        return {"value": float(correct.mean()), "low": low, "high": high, "n": correct.size}

    def metrics(self, reading: str = "verl") -> dict[str, float]:
        """One flat dictionary for logs."""
        return {
            "val/avg_at_k": self.avg_at_k(reading),
            "val/pass_at_k": self.pass_at_k(reading),
            "val/response_length/mean": float(self.response_tokens.mean()),
            "val/response_length/clip_ratio": float(self.truncated.mean()),
            "val/correct_without_box": float((self.verl * ~self.has_box).mean()),
            "val/correct_truncated": float((self.correct(reading) * self.truncated).mean()),
            "val/grading_failures": float(self.grading_failures),
        }


def evaluate(
    engine, tokenizer, problems: Sequence[Problem], *, samples: int, sampling: Sampling, grader: Grader
) -> EvaluationResult:
    """Sample `samples` responses to every problem through `engine.generate` and grade them.

    engine: a `RolloutEngine` with nothing unfinished; tokenizer: decodes response ids (special tokens dropped).
    Raises ValueError on an empty problem list or `samples` below 1.
    """
    require(len(problems) > 0, "problems", problems, "at least one problem")
    require(samples >= 1, "samples", samples, "an integer >= 1")
    responses = engine.generate(
        [problem.tokens for problem in problems],
        sampling,
        prompt_ids=[problem.prompt_id for problem in problems],
        samples=samples,
    )
    texts = [tokenizer.decode(response.tokens, skip_special_tokens=True) for response in responses]
    golds = [problem.answer for problem in problems for _ in range(samples)]
    verdicts = grader.grade_many(list(zip(texts, golds, strict=True)))
    return _result(verdicts, responses, (len(problems), samples))


def _result(verdicts: Sequence[Verdict], responses: Sequence, shape: tuple[int, int]) -> EvaluationResult:
    def table(values, dtype) -> np.ndarray:
        return np.array(list(values), dtype=dtype).reshape(shape)

    return EvaluationResult(
        verl=table((v.verl for v in verdicts), np.float64),
        last_box=table((v.last_box for v in verdicts), np.float64),
        has_box=table((v.has_box for v in verdicts), bool),
        truncated=table((r.finish_reason == "length" for r in responses), bool),
        response_tokens=table((len(r.tokens) for r in responses), np.int64),
        grading_failures=sum(v.timed_out or v.worker_died for v in verdicts),
    )
