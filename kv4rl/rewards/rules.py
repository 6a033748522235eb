"""Compares an answer with a `Gold`: all answers required, numbers within its tolerance, the rest by Math-Verify (§B.2).

Numbers are compared exactly first: Math-Verify rounds to six decimals, under which 5e-9 equals 2e-10, and reads 4.5e33
as 4.5·e·33. Units are not stripped from golds: they are symbols there (`\\frac{37}{4} m`, a mass).
Imports Math-Verify and sympy, so only grading workers, and who checks data, import this module.
"""

from dataclasses import replace
from functools import lru_cache

from math_verify import ExprExtractionConfig, LatexExtractionConfig, verify
from sympy import Basic, Expr, Float, I, Rational, Symbol, UnevaluatedExpr

from kv4rl.rewards.answers import (
    assigned,
    braced,
    bracketed,
    list_readings,
    plain_number,
    split_list,
    tidy,
    without_unit,
)
from kv4rl.rewards.boxes import closing_boxes, last_box
from kv4rl.rewards.gold import Gold
from kv4rl.rewards.readings import GOLD_TARGETS, parse_quietly

_KEEP_UNITS = LatexExtractionConfig(normalization_config=replace(GOLD_TARGETS[0].normalization_config, units=False))
DIGITS = 40  # of a difference: beyond any tolerance, also for numbers of thirty digits


def verl_rules(text: str, gold: Gold) -> bool:
    """The verl reading: what Math-Verify extracts from the whole response, compared by the rules."""
    found = parse_quietly(text, (ExprExtractionConfig(), _KEEP_UNITS))
    return any(matches(answer, gold) for answer in found if isinstance(answer, str))


def box_rules(text: str, gold: Gold) -> bool:
    """The last-box reading; of a question with several answers, each may have a box of its own at the end."""
    box = last_box(text)
    if box is None:
        return False
    return matches(box, gold) or (len(gold.answers) > 1 and matches(", ".join(closing_boxes(text)), gold))


@lru_cache(maxsize=4096)
def matches(answer: str, gold: Gold) -> bool:
    """Whether the text of an answer gives every answer of `gold` and no other."""
    golds = [tidy(item) for item in gold.answers]
    written = tidy(answer)
    if len(golds) == 1:
        return _equal(golds[0], written, gold) or _tuple_without_brackets(golds[0], written, gold)
    return any(_match_lists(golds, given, gold) for given in list_readings(written))


def how(answer: str) -> str:
    """How one answer of a gold is compared: "number", "formula" (Math-Verify parses it) or "spelling" (it does not)."""
    text = tidy(answer)
    parts = bracketed(assigned(text))
    if parts:
        kinds = {how(part) for part in parts[1]}
        return next(kind for kind in ("spelling", "formula", "number") if kind in kinds)
    if number(text) is not None or number(assigned(text)) is not None:
        return "number"
    return "formula" if any(isinstance(parsed, Basic) for parsed in _parse(text)) else "spelling"


def _match_lists(golds: list[str], given: list[str], gold: Gold) -> bool:
    """A one-to-one match of two lists, in any order."""
    if len(golds) != len(given):
        return False
    left = list(given)
    for item in golds:
        match = next((answer for answer in left if _equal(item, answer, gold)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _tuple_without_brackets(item: str, written: str, gold: Gold) -> bool:
    """(a, b) written as `a, b` or `x = a, y = b`: the order counts."""
    parts, given = bracketed(assigned(item)), split_list(written)
    if parts is None or parts[0] + parts[2] != "()" or len(given) != len(parts[1]) or bracketed(assigned(written)):
        return False
    return "\\{" not in written and all(_equal(*pair, gold) for pair in zip(parts[1], given, strict=True))


def _equal(item: str, answer: str, gold: Gold) -> bool:
    """One answer against one of the gold's."""
    if item == answer:
        return True
    left, right = assigned(item), assigned(answer)
    ours, theirs = bracketed(left), bracketed(right)
    if ours and theirs:
        same = ours[0] == theirs[0] and ours[2] == theirs[2] and len(ours[1]) == len(theirs[1])
        return same and all(_equal(*pair, gold) for pair in zip(ours[1], theirs[1], strict=True))
    if ours and braced(right) is not None:
        return False  # Math-Verify takes (1, 2) and {1, 2} for the same
    wanted = number(left)
    if wanted is not None:
        value = number(right)
        value = number(without_unit(right)) if value is None else value
        return value is not None and _within(wanted, value, gold)
    return _same_formula(item, answer) or _same_formula(left, right) or _same_formula(left, without_unit(right))


def _same_formula(item: str, answer: str) -> bool:
    golds, found = _parse(item), _parse(answer)
    how_to = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}
    return any(verify(g, f, **how_to) for g in golds for f in found)


@lru_cache(maxsize=8192)
def _parse(text: str) -> tuple:
    return tuple(parse_quietly(f"\\boxed{{{text}}}", (_KEEP_UNITS,)))


@lru_cache(maxsize=8192)
def number(text: str) -> tuple[Expr, bool] | None:
    """(value, is a percentage) of a finite real or complex number, exact where its text is; None if it is none."""
    percent = text.rstrip().endswith("%")
    text = text.rstrip().rstrip("%").rstrip("\\").rstrip() if percent else text
    fraction = plain_number(text)
    if fraction is not None:
        return Rational(fraction.numerator, fraction.denominator), percent
    for parsed in _parse(text):
        value = _value(parsed)
        if value is not None:
            return value, percent
    return None


def _value(parsed: object) -> Expr | None:
    if not isinstance(parsed, Expr):
        return None
    value = parsed.xreplace({symbol: I for symbol in parsed.free_symbols if symbol.name == "i"})
    if value.free_symbols or value.atoms(Symbol):
        return None
    value = value.xreplace({part: Rational(str(part)) for part in value.atoms(Float)})
    value = value.replace(lambda part: isinstance(part, UnevaluatedExpr), lambda part: part.args[0]).doit()
    return value if value.is_number and value.is_finite else None


def _within(wanted: tuple[Expr, bool], given: tuple[Expr, bool], gold: Gold) -> bool:
    """40 % may be written 40, 40 % or 0.4, whichever the gold has (as Math-Verify has it); the tolerance scales."""
    scales = {(1, 1)}
    if wanted[1] or given[1]:
        scales |= {(100, 1), (1, 100)}
    return any(_near(wanted[0] / a, given[0] / b, gold, a) for a, b in scales)


def _near(wanted: Expr, given: Expr, gold: Gold, scale: int) -> bool:
    distance = abs((wanted - given).evalf(DIGITS))
    if gold.relative is not None:
        return bool(distance <= Rational(str(gold.relative)) * abs(wanted.evalf(DIGITS)))
    return bool(distance <= Rational(str(gold.absolute or 0)) / scale)
