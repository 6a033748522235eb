"""Write mini tasks as the .jsonl file that `JsonlStream` reads: `python -m kv4rl.tasks.export`."""

import argparse
import json
from pathlib import Path

from kv4rl.cli import one_sentence
from kv4rl.config import require_integer
from kv4rl.results import REPOSITORY
from kv4rl.tasks.mini import SPLITS, MiniProblem, write_solution
from kv4rl.tasks.stream import mini_problems


def jsonl_line(prompt_id: str, problem: MiniProblem) -> str:
    """One task file line; `solution` is for the reader, streams ignore it."""
    record = {"prompt_id": prompt_id, "prompt": problem.prompt, "answer": problem.answer}
    return json.dumps(record | {"solution": write_solution(problem)})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", choices=SPLITS, default="evaluation")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--output", type=Path, default=None, help="default data/tasks/mini-SPLIT.jsonl")
    given = parser.parse_args(arguments)
    with one_sentence("kv4rl.tasks.export"):
        require_integer(given.count, "count", 1)
        export(given.split, given.seed, given.count, given.output)


def export(split: str, seed: int, count: int, output: Path | None = None) -> None:
    """Write the first `count` problems of a split, by default to data/tasks/mini-SPLIT.jsonl."""
    output = output or REPOSITORY / "data" / "tasks" / f"mini-{split}.jsonl"
    problems = enumerate(mini_problems(seed, split, count))
    lines = [jsonl_line(f"mini-{split}-{seed}-{index}", problem) for index, problem in problems]
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
