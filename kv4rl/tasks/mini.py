"""The mini task: a recurrence that reads its own past, so that every step depends on tokens far back.

    n=08 k=02 r=2 x=12,45,78,03         x_1..x_4 are given, then x_i = (x_{i-1} + x_{i // r}) mod 100 up to x_n
    05:45>48;06:78>26;07:78>04;08:03>07;=45\\boxed{52}

A step's line holds its index, the value looked back at (x_{i // r}, half or two thirds of the response ago) and the
new value. The answer is x_n + x_k mod 100 for a k the prompt names. The number of steps is log-normal, so response
lengths are heavy-tailed (p99 over five times the median), as §3's are.
"""

import hashlib
import random
import re
from dataclasses import dataclass

from kv4rl.config import require

MODULUS = 100
START_VALUES = 4
LAST_INDEX = 99  # indices are written in two digits
MEDIAN_STEPS = 10
SIGMA_STEPS = 0.85
DIVISORS = (2, 3)
SPLITS = ("train", "evaluation")
EVALUATION_SHARE = 1 / 16

_LINE = re.compile(r"(\d\d):(\d\d)>(\d\d);")
_END = re.compile(r"=(\d\d)\\boxed\{(\d\d)\}")


@dataclass(frozen=True)
class MiniProblem:
    """One task. `last` is n, `probe` is k (1 <= k < n), `divisor` is r, `start` holds x_1..x_4."""

    last: int
    probe: int
    divisor: int
    start: tuple[int, ...]

    def __post_init__(self):
        require(START_VALUES < self.last <= LAST_INDEX, "last", self.last, f"in [{START_VALUES + 1}, {LAST_INDEX}]")
        require(1 <= self.probe < self.last, "probe", self.probe, f"in [1, {self.last - 1}]")
        require(self.divisor in DIVISORS, "divisor", self.divisor, f"one of {DIVISORS}")
        fits = len(self.start) == START_VALUES and all(0 <= x < MODULUS for x in self.start)
        require(fits, "start", self.start, f"{START_VALUES} values in [0, {MODULUS - 1}]")

    @property
    def prompt(self) -> str:
        values = ",".join(f"{x:02d}" for x in self.start)
        return f"n={self.last:02d} k={self.probe:02d} r={self.divisor} x={values}\n"

    @property
    def steps(self) -> int:
        """Lines the worked solution has."""
        return self.last - START_VALUES

    @property
    def answer(self) -> str:
        """The gold answer, without leading zeros."""
        values = [0, *self.start]  # one-based, as the task is
        for index in range(START_VALUES + 1, self.last + 1):
            values.append((values[-1] + values[index // self.divisor]) % MODULUS)
        return str((values[-1] + values[self.probe]) % MODULUS)

    @property
    def split(self) -> str:
        """`train` or `evaluation`, by a hash of the prompt: no problem is in both."""
        digest = hashlib.sha256(self.prompt.encode()).digest()
        return SPLITS[digest[0] < 256 * EVALUATION_SHARE]


def draw_problem(rng: random.Random, split: str = "train") -> MiniProblem:
    """A random problem of one split; its number of steps is log-normal, rounded, and capped by two-digit indices."""
    require(split in SPLITS, "split", split, f"one of {SPLITS}")
    while True:
        steps = round(MEDIAN_STEPS * rng.lognormvariate(0, SIGMA_STEPS))
        last = START_VALUES + min(max(steps, 1), LAST_INDEX - START_VALUES)
        start = tuple(rng.randrange(MODULUS) for _ in range(START_VALUES))
        problem = MiniProblem(last, rng.randrange(1, last), rng.choice(DIVISORS), start)
        if problem.split == split:
            return problem


def write_solution(problem: MiniProblem, slip_rate: float = 0.0, rng: random.Random | None = None) -> str:
    """The worked solution; with `slip_rate`, one in which each step goes wrong with that probability.

    A slip reads a wrong earlier value or changes one digit of the sum, and the rest follows from what was written, as
    in a text by someone who makes mistakes. A model trained on such texts makes them at temperature 1.
    """
    require(0 <= slip_rate < 1, "slip_rate", slip_rate, "a probability below 1")
    require(slip_rate == 0 or rng is not None, "rng", rng, "a random.Random when slip_rate > 0")
    values, lines = [0, *problem.start], []
    for index in range(START_VALUES + 1, problem.last + 1):
        read, total = _step(values, index // problem.divisor, slip_rate, rng)
        values.append(total)
        lines.append(f"{index:02d}:{read:02d}>{total:02d};")
    read, total = _step(values, problem.probe, slip_rate, rng)
    return "".join(lines) + f"={read:02d}\\boxed{{{total:02d}}}"


def _step(values: list[int], source: int, slip_rate: float, rng: random.Random | None) -> tuple[int, int]:
    """(value looked back at, its sum with the last value), either of them wrong with probability `slip_rate`."""
    slips = slip_rate > 0 and rng.random() < slip_rate
    if not slips:
        return values[source], (values[-1] + values[source]) % MODULUS
    if rng.random() < 0.5:
        read = values[rng.randrange(1, len(values))]
        return read, (values[-1] + read) % MODULUS
    tens, ones = divmod((values[-1] + values[source]) % MODULUS, 10)
    wrong = rng.choice([(rng.randrange(10), ones), (tens, rng.randrange(10))])
    return values[source], 10 * wrong[0] + wrong[1]


def first_error(problem: MiniProblem, text: str) -> str:
    """Kind of the first error in a worked solution, judged against what the text itself wrote before it.

    One of `none`, `look_back` (a wrong earlier value), `arithmetic` (a wrong sum), `answer_look_back`, `answer_sum`,
    `index` (steps out of order, too few or too many) and `format` (does not parse, e.g. cut off).
    """
    values, position = [0, *problem.start], 0
    for index in range(START_VALUES + 1, problem.last + 1):
        line = _LINE.match(text, position)
        if line is None:
            return "index" if _END.match(text, position) else "format"
        written, read, total = map(int, line.groups())
        if written != index:
            return "index"
        if read != values[index // problem.divisor]:
            return "look_back"
        if total != (values[-1] + read) % MODULUS:
            return "arithmetic"
        values.append(total)
        position = line.end()
    return _ending_error(problem, values, text[position:])


def _ending_error(problem: MiniProblem, values: list[int], ending: str) -> str:
    end = _END.fullmatch(ending)
    if end is None:
        return "index" if _LINE.match(ending) else "format"
    read, total = map(int, end.groups())
    if read != values[problem.probe]:
        return "answer_look_back"
    return "none" if total == (values[-1] + read) % MODULUS else "answer_sum"
