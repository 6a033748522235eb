"""What we decided for answers on which readings differ: a table that tests hold and notebooks show.

`verl` and `last_box` are the scores Math-Verify 0.9 gives under each reading (`readings.py`); `right` is what a careful
person would give, None where that is a matter of policy. We replicate the paper, so `verl` is the default even where
it differs from `right`; `decision` says what we do about it. Wording and numbers are ours.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """One answer, its scores under both readings, the right score, and our decision with its reason."""

    name: str
    gold: str
    response: str
    verl: int
    last_box: int
    right: int | None
    decision: str


_LENIENT = "Kept: Math-Verify is lenient here under both readings, and the paper grades with it."

CASES = (
    Case("plain box", "58", "29 + 29 makes \\boxed{58}", 1, 1, 1, "The common case."),
    Case("wrong box", "58", "29 + 29 makes \\boxed{57}", 0, 0, 0, "The common case."),
    Case("negated", "-58", "\\boxed{58}", 0, 0, 0, "Signs count."),
    Case(
        "corrected answer, bare boxes", "58",
        "So \\boxed{57}. No, I dropped a carry. The answer is therefore \\boxed{58}", 0, 1, 1,
        "Kept for verl: its greedy box pattern merges neighbouring bare boxes into {57, 58}. last_box is right.",
    ),
    Case(
        "corrected answer, boxes in dollars", "58",
        "So $\\boxed{57}$. No, I dropped a carry. The answer is therefore $\\boxed{58}$", 1, 1, 1,
        "Delimited boxes are matched one by one, so the last one counts under both readings.",
    ),
    Case(
        "two boxes side by side", "58", "\\boxed{57} \\boxed{58}", 0, 1, None,
        "Kept: verl refuses hedging, last_box takes the final word; watch `last_box` for reward hacking.",
    ),
    Case("hedge, right one first", "58", "\\boxed{58}. Or is it \\boxed{57}", 0, 0, 0, "No credit for a hedge."),
    Case("hedge inside one box", "58", "\\boxed{57\\text{ or }58}", 0, 0, 0, "No credit for a hedge."),
    Case("list where one number is asked", "58", "\\boxed{57, 58}", 0, 0, 0, "No credit for a hedge."),
    Case(
        "draft box, then the answer", "58", "<think>maybe \\boxed{57}</think> \\boxed{58}", 0, 1, 1,
        "As for corrected answers: merged by verl.",
    ),
    Case(
        "cut off while trying values", "58", "Let us try n = 58. Then the remainder of the", 1, 0, 0,
        "Kept for verl, which reads prose when there is no box. Logged as `reward/correct_truncated`.",
    ),
    Case(
        "cut off inside the box", "58", "The sum of both halves gives \\boxed{58", 0, 0, 0,
        "An unclosed box holds no answer: 58 might have become 587.",
    ),
    Case(
        "cut off inside a second box", "58", "\\boxed{58} and then, to check it, \\boxed{5", 1, 1, None,
        "The last *balanced* box stands under both readings.",
    ),
    Case(
        "box that does not parse", "58", "After 57 and 58 I cannot decide: \\boxed{?}", 1, 0, 0,
        "Kept for verl, which falls back to the last number in the prose. `has_box` is true, so it is not in "
        "`reward/correct_without_box`: compare the two readings' means to see it.",
    ),
    Case("empty box", "58", "After 57 and 58 I cannot decide: \\boxed{}", 1, 0, 0, "As for a box that does not parse."),
    Case(
        "answer without a box", "58", "**Final Answer: 58**", 1, 0, None,
        "Policy: verl asks for no box. Logged as `reward/correct_without_box`.",
    ),
    Case("nothing but the number", "58", "58", 1, 0, None, "As for an answer without a box."),
    Case("box without braces", "58", "Hence \\boxed 58", 1, 0, None, "Not a box to us; verl finds the number anyway."),
    Case("empty response", "58", "", 0, 0, 0, "Nothing to read."),
    Case("no number at all", "58", "I do not know.", 0, 0, 0, "Nothing to read."),
    Case("check after the box", "58", "\\boxed{58}. Let me also see that 12 + 30 = 42.", 1, 1, 1, "Boxes go first."),
    Case("digit after the box", "58", "\\boxed{5}8", 0, 0, 0, "The box's content is the answer, whatever follows it."),
    Case("nested boxes", "58", "\\boxed{\\boxed{58}}", 1, 1, 1, "The inner box is the last."),
    Case("fbox", "58", "The answer is \\fbox{58}", 0, 1, 1, "last_box takes \\fbox as a box; verl's patterns do not."),
    Case("unevaluated sum", "58", "\\boxed{29 + 29}", 1, 1, None, _LENIENT),
    Case("assignment", "58", "\\boxed{x = 58}", 1, 1, 1, "Math-Verify unwraps assignments."),
    Case("units", "58", "\\boxed{58 \\text{ apples}}", 1, 1, 1, "Math-Verify strips units."),
    Case("words inside the box", "58", "\\boxed{\\text{The answer is }58}", 0, 0, 1, "Kept: both readings are strict."),
    Case("thousands separator", "1234", "\\boxed{1,234}", 1, 1, 1, "Read as a number, not as a pair."),
    Case("scientific notation", "7 \\cdot 10^5", "\\boxed{7e5}", 0, 0, 1, "Kept: Math-Verify reads 7e5 as 7·e·5."),
    Case("power of ten written out", "7 \\cdot 10^5", "\\boxed{700000}", 1, 1, 1, "Equal numbers."),
    Case("unreduced fraction", "\\frac{3}{7}", "\\boxed{\\dfrac{6}{14}}", 1, 1, 1, "Equal numbers."),
    Case("six decimals", "\\frac{3}{7}", "\\boxed{0.428571}", 1, 1, None, "Policy: equal when rounded to 6 decimals."),
    Case("four decimals", "\\frac{3}{7}", "\\boxed{0.4286}", 0, 0, 0, "Differs within 6 decimals."),
    Case("small decimals, seventh digit", "0.002", "\\boxed{0.0020003}", 1, 1, 0, _LENIENT),
    Case("tiny quotients of factorials", "\\frac{1}{1990!}", "\\boxed{\\frac{1}{1994!}}", 1, 1, 0, _LENIENT),
    Case("tiny powers", "\\frac{1}{2^{70}}", "\\boxed{\\frac{1}{2^{71}}}", 1, 1, 0, _LENIENT),
    Case("radical", "2\\sqrt{3}", "\\boxed{\\sqrt{12}}", 1, 1, 1, "Equal after simplification."),
    Case("factored polynomial", "x^2-1", "\\boxed{(x-1)(x+1)}", 1, 1, 1, "Equal after simplification."),
    Case("sign in the exponent", "\\mathrm{e}^{2}", "\\boxed{\\mathrm{e}^{-2}}", 0, 0, 0, "Older versions erred here."),
    Case("point against a set", "(3,4)", "\\boxed{\\{3,4\\}}", 1, 1, 0, _LENIENT + " The gold parses as an interval."),
    Case("point, coordinates swapped", "(3,4)", "\\boxed{(4,3)}", 0, 0, 0, "Order counts in a point."),
    Case("point against a closed interval", "(3,4)", "\\boxed{[3,4]}", 0, 0, 0, "Different objects."),
    Case("interval as an inequality", "[2,7)", "\\boxed{2 \\le x < 7}", 0, 0, 1, "Kept: Math-Verify does not convert."),
    Case("list, one missing", "5,6,9", "\\boxed{5,6}", 0, 0, 0, "Every element is needed."),
    Case("list, reordered", "5,6,9", "\\boxed{9,5,6}", 1, 1, 1, "A bare list is a set."),
    Case("both signs", "\\pm 11", "\\boxed{11}", 0, 0, 0, "Both are needed."),
    Case("percent for a count", "40", "\\boxed{40\\%}", 1, 1, None, "Policy: lenient both ways."),
    Case("percent for a fraction", "0.4", "\\boxed{40\\%}", 1, 1, None, "Policy: lenient both ways."),
    Case("word, other case", "\\text{Monday}", "\\boxed{monday}", 1, 1, 1, "Words compare without case."),
    Case("other word", "\\text{Monday}", "\\boxed{\\text{Friday}}", 0, 0, 0, "Words compare as a whole."),
)  # fmt: skip

PATHOLOGICAL = (
    ("tower of exponents", "\\boxed{9^{9^{9^9}}}"),
    ("tall tower", "\\boxed{" + "^".join(["9"] * 50) + "}"),
    ("power too large to hold", "\\boxed{10^{10^{10}}}"),
    ("factorial", "\\boxed{(10^{7})!}"),
    ("binomial", "\\boxed{\\binom{10^{9}}{5 \\cdot 10^{8}}}"),
    ("expansion", "\\boxed{(a+b+c+d+e+f)^{60}}"),
    ("long sum", "\\boxed{\\sum_{k=1}^{10^9} \\frac{1}{k}}"),
    ("hard integral", "\\boxed{\\int e^{x^x} \\sin(\\tan x) dx}"),
    ("deep parentheses", "\\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}"),
    ("deep fractions", "\\boxed{" + "\\frac{1}{" * 2000 + "1" + "}" * 2001),
    ("long chain of terms", "\\boxed{" + "1+" * 20000 + "1}"),
    ("many open boxes", "\\boxed{" * 20000),
    ("many numbers", "1 2 3 " * 30000),
    ("many digits", "\\boxed{" + "9" * 100000 + "}"),
    ("many dollars", "$" * 50000),
)
"""Answers (name, response) that take minutes, gigabytes or forever to evaluate; none equals `PATHOLOGICAL_GOLD`."""

PATHOLOGICAL_GOLD = "(a+b+c+d+e+f)^{59}"
