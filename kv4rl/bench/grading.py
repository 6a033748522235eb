"""Is grading ever the longest part of an interval: seconds that the reward takes for one quota of responses (§A.1).

Responses of a fit's lengths, made of sentences with the expressions that solutions of mathematics problems hold, since
the verl reading looks at all of them; each ends in a box with its gold, another answer, or in nothing. All are handed
in at once, as if every group of the interval finished together: in training they come while others are still decoded.

    python -m kv4rl.bench grading --fits 4B-500 --groups 64 --workers 2
"""

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

from kv4rl.bench.refusals import MOST_AT_ONCE, require_counts, require_writable
from kv4rl.cli import one_sentence
from kv4rl.config import LARGEST, require, require_integer, require_number
from kv4rl.results import RESULTS, result_row, write_rows
from kv4rl.rewards.grader import Grader, Verdict
from kv4rl.rollout.fits import FITS

CHARACTERS = 3.0  # a token of mathematical text, about
SENTENCES = (
    "Let $x_{{{0}}} = \\frac{{{1}}}{{{2}}}$, so that $x_{{{0}}}^2 + {1} = {2}$. ",
    "We check step {0}: {1} + {2} = ${3}$, hence the remainder is {0} modulo {2}. ",
    "Because $\\sqrt{{{1}}} \\le {2}$, the interval $({0}, {1}]$ holds every root. ",
    "Wait, this would give \\({0}\\pi + {3}\\), which cannot be, so we try again. ",
)
ANSWERS = (
    "{0}", "\\frac{{{0}}}{{{1}}}", "{0}\\sqrt{{{1}}}", "({0}, {1})", "[{0}, {1}]", "{0}.{1}", "{0} + {1}i", "{0}\\pi"
)  # fmt: skip
Item = tuple[str, str]  # response and gold


def answer(rng: np.random.Generator) -> str:
    low, high = sorted(rng.integers(1, 1000, 2).tolist())
    return ANSWERS[rng.integers(len(ANSWERS))].format(low, high + 1)


def response(rng: np.random.Generator, tokens: int, gold: str) -> str:
    """Sentences of some `tokens` tokens, then a box with the gold, one with another answer, or the text cut off."""
    parts, room = [], CHARACTERS * tokens
    while room > 0:
        parts.append(SENTENCES[rng.integers(len(SENTENCES))].format(*rng.integers(1, 1000, 4)))
        room -= len(parts[-1])
    boxed = (gold, answer(rng), None)[rng.integers(3)]
    return "".join(parts) + ("" if boxed is None else f"The answer is $\\boxed{{{boxed}}}$.")


def interval(fit: str, groups: int, seed: int) -> list[Item]:
    """The responses of `groups` prompts, siblings after one another, each prompt with a gold of its own."""
    rng, workload, items = np.random.default_rng(seed), FITS[fit].workload(), []
    for prompt in range(groups):
        gold = answer(rng)
        items += [(response(rng, tokens, gold), gold) for tokens in workload.group(prompt)[1]]
    return items


def seconds(items: Sequence[Item], workers: int, timeout_s: float) -> tuple[float, list[Verdict]]:
    """Wall-clock seconds until every response has its verdict, by workers that run already; and the verdicts."""
    with Grader(workers, timeout_s) as grader:
        grader.grade_many([("\\boxed{1}", "1")] * workers)  # started and warm
        begin = time.perf_counter()
        verdicts = grader.grade_many(items)
        return time.perf_counter() - begin, verdicts


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kv4rl.bench grading", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fits", nargs="+", default=["4B-500", "8B-400"], choices=tuple(FITS))
    parser.add_argument("--groups", type=int, default=128, help="T; eight siblings each")
    parser.add_argument("--workers", type=int, default=2, help="processes of a rank's grader")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="of one response")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="grading.csv", help="CSV under data/results, or an absolute path")
    options = parser.parse_args(arguments)
    with one_sentence("kv4rl.bench grading"):
        require_counts(options, groups=1, workers=1)
        require(options.groups <= MOST_AT_ONCE, "groups", options.groups, f"at most {MOST_AT_ONCE}")
        require_integer(options.seed, "seed", 0)
        require_number(options.timeout_s, "timeout-s", 0, LARGEST, open_low=True)
        require_writable(options.out)
    return options


def main(arguments: list[str] | None = None) -> None:
    options, rows, found = parse(arguments), [], {}
    for fit in options.fits:
        items = interval(fit, options.groups, options.seed)
        taken, verdicts = seconds(items, options.workers, options.timeout_s)
        lost = sum(verdict.error is not None for verdict in verdicts)
        about = {"experiment": "grading", "arm": f"{options.workers} workers", "model": "math-verify", "shape": fit}
        values = {
            "interval_s": (taken, "s"),
            "responses_per_s": (len(items) / taken, "1/s"),
            "failed": (lost, "responses"),
        }
        for metric, (value, unit) in values.items():
            rows.append(result_row(**about, metric=metric, unit=unit, value=value, n=len(items)))
        found[fit] = round(taken, 2)
        characters = sum(len(text) for text, _ in items) / 1e6
        print(
            f"{fit}: {len(items)} responses, {characters:.1f} million characters, {taken:.1f} s, {lost} failed",
            flush=True,
        )
        write_rows(options.out, rows)
    print(json.dumps({"experiment": "grading", "file": str(RESULTS / options.out), "interval_s": found}))


if __name__ == "__main__":
    main()
