"""What a response is worth under the two readings of "boxed answer" (design decision 10), by Math-Verify.

`verl` (the paper's, §A.1): the gold is wrapped as `\\boxed{gold}` and read with LaTeX extraction; the *whole* response
is read with plain-expression and LaTeX extraction; 1 if any extracted prediction equals any extracted gold.
`last_box`: the last balanced `\\boxed{...}` of the response is read as the gold is, and nothing else.

Nothing here sets a clock: Math-Verify's own alarms are off, and the worker (`worker.py`) keeps one over each reading.
Imports Math-Verify and sympy, so the trainer's process does not import this module.
"""

import logging
import re
from functools import lru_cache

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase

GOLD_TARGETS = (LatexExtractionConfig(),)
RESPONSE_TARGETS = (ExprExtractionConfig(), LatexExtractionConfig())  # verl's order; it breaks ties between matches

PLAIN, WORD = re.compile(r"[^\W\d_]+(?:[\s,.;!?'-]+[^\W\d_]+)*[.!?]*"), re.compile(r"[^\W\d_]{3,}")  # no mathematics

# Both warn, once per process, that their alarms are off. They are, on purpose.
for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).setLevel(logging.ERROR)


def parse_quietly(text: str, targets: tuple) -> list:
    """Math-Verify's `parse` without its own alarms; what it raises is raised."""
    return parse(text, targets, parsing_timeout=None, raise_on_error=True)


@lru_cache(maxsize=1024)
def parse_gold(gold: str) -> tuple:
    """Everything Math-Verify extracts from `\\boxed{gold}`: sympy objects, then the text itself as a fallback."""
    return tuple(parse_quietly(f"\\boxed{{{gold}}}", GOLD_TARGETS))


def _any_equal(golds: tuple, predictions: tuple | list) -> bool:
    return any(verify(g, p, timeout_seconds=None, raise_on_error=True) for p in predictions for g in golds)


def verl_reading(text: str, gold: str) -> bool:
    """verl's `reward_score/math_verify.py`: any prediction found anywhere in `text` equals any gold."""
    golds = parse_gold(gold)
    return bool(golds) and _any_equal(golds, parse_quietly(text, RESPONSE_TARGETS))


@lru_cache(maxsize=4096)
def box_reading(box: str, gold: str) -> bool:
    """Content of one box against one gold. Cached: siblings repeat answers, and the verdict depends on nothing else."""
    return _any_equal(parse_gold(gold), parse_gold(box))


def parses(gold: str) -> bool:
    """Whether Math-Verify reads `gold` as mathematics; if not, it can only ever match by its exact spelling."""
    return any(isinstance(parsed, Basic | MatrixBase) for parsed in parse_gold(gold))


def check_gold(gold: str) -> None:
    """Raise `ValueError` unless Math-Verify reads `gold` as mathematics that equals itself.

    A gold that does not parse could only ever match by its exact spelling, so it belongs out of the training set.
    """
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(f"gold={gold!r}: expected a non-empty string")
    if len(WORD.findall(gold)) >= 2 and PLAIN.fullmatch(gold.strip()):
        raise ValueError(f"gold={gold!r}: expected mathematics, not words: Math-Verify multiplies letters in any order")
    if not parses(gold):
        raise ValueError(f"gold={gold!r}: expected an answer that Math-Verify can parse inside \\boxed{{}}")
    if not box_reading(gold, gold):
        raise ValueError(f"gold={gold!r}: expected an answer that equals itself; Math-Verify says it does not")
