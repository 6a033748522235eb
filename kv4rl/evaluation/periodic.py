"""What a run is judged on while it trains: problems that its tasks hold out, and sets of Table A2 (§B.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kv4rl.config import TrainConfig
from kv4rl.evaluation.benchmarks import ProblemSet, load_sets
from kv4rl.evaluation.prompts import prompt_tokens
from kv4rl.rollout.group import Prompt
from kv4rl.tasks.datasets import held_out_stream
from kv4rl.tasks.stream import LeftOut, take


@dataclass(frozen=True)
class QuestionSet:
    """Prompts, k samples for each, and what its metrics' names begin with: `val/`, or `val/<set>/`."""

    prefix: str
    samples: int
    prompts: Sequence[Prompt]

    def named(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of `EvaluationResult.metrics` under this set's names."""
        return {name.replace("val/", self.prefix, 1): value for name, value in metrics.items()}


def question_sets(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[QuestionSet], list[LeftOut]]:
    """The sets of a configuration, and the held-out lines whose gold answer cannot be graded.

    Raises InputError for a prompt that the limits do not hold, ConnectionError, naming the local file that would do,
    where the hub does not deliver a set.
    """
    given = load_sets(config.evaluate_sets, flag="--evaluate_sets") if config.evaluate_sets else []
    sets = [_of_benchmark(problems, config, tokenizer) for problems in given]
    limit = config.rollout.max_prompt_tokens
    stream = held_out_stream(config.tasks, tokenizer, seed=config.seed, max_prompt_tokens=limit)
    if stream is None:
        return sets, []
    count = config.evaluate_prompts if stream.size is None else min(config.evaluate_prompts, stream.size)
    return [QuestionSet("val/", config.evaluate_samples, take(stream, count)), *sets], list(stream.left_out)


def _of_benchmark(problems: ProblemSet, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> QuestionSet:
    samples = problems.benchmark.samples if problems.benchmark else config.evaluate_samples
    limit = config.rollout.max_prompt_tokens
    tokens = lambda row: prompt_tokens(row.text, row.problem_id, tokenizer, limit)
    prompts = [Prompt(row.problem_id, tokens(row), row.answer, row.text) for row in problems.problems]
    return QuestionSet(f"val/{problems.name}/", samples, prompts)
