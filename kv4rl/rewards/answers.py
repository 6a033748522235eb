"""Takes the text of an answer apart: notation made uniform, lists, assignments, tuples, units. No sympy here.

Only golds of type `Gold` are compared this way (`rules.py`); a training gold is a string and Math-Verify's alone.
"""

import re
from fractions import Fraction
from itertools import product

_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_NOTATION = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"−", "-"),
        (r"×", r"\\times "),
        (r"·", r"\\cdot "),
        (r"°|\^\s*\\circ|\^\s*\{\s*\\circ\s*\}|\\degree", ""),  # angles compare as the numbers they are written with
        (r",\s*\\!|\{,\}", ""),  # LaTeX's thousands separators
        (r"\\(?:left|right|big|Big|bigg|Bigg)(?![a-zA-Z])|\\displaystyle|\$", ""),
        (r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\([gl]e)(?:q|qslant)(?![a-zA-Z])", r"\\\1 "),
        (r"\\hbar(?![a-zA-Z])", "h_{bar}"),  # Math-Verify's grammar has none of the next as symbols
        (r"_\{\s*\\odot\s*\}|_\\odot(?![a-zA-Z])", "_{sun}"),
        (r"_\{\s*\\(max|min)\s*\}", r"_{\1}"),
        (r"([A-Za-z])\s*(?:''|\^\s*\{?\s*\\prime\s*\\prime\s*\}?)", r"\1_{second}"),
        (r"([A-Za-z])\s*(?:'|\^\s*\{?\s*\\prime\s*\}?)", r"\1_{prime}"),
        (r"\\(text|mathrm|mbox)\s+\{", r"\\\1{"),
        (r"\\(?:text|mathrm)\{([A-Z]{2,})\}", r"\1"),
        (r"\\gamma(?![a-zA-Z])", "g_{gamma}"),  # a Lorentz factor, not Euler's constant or a function
        (r"\\operatorname\s*\{a(?:rc)?(sin|cos|tan)\}", r"\\arc\1"),
        (r"(?<![A-Za-z\\])E(?=_)", r"\\Xi "),  # E_1 is an energy, not Euler's number
        (r"\bnp\.(?=[a-z])", r"\\"),
        (rf"(?<![A-Za-z0-9_{{\\.])({_DECIMAL})[eE]([+-]?\d+)(?![\w.])", r"\1 \\times 10^{\2}"),
        (r"(\d)\.(?=\s*(?:[/)}+*-]|$))", r"\1"),
        (r",?\s*\\?(?:text\s*\{)?\s*\bwhere\b.*$", ""),  # a condition in words: only the formula can be compared
        (r"^\s*(?:\\(?:approx|simeq|sim)(?![a-zA-Z])|=)", ""),
        (r"\s+", " "),
    )
]
_TOKEN = re.compile(
    r"(?P<separator>\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[,;])"
    r"|(?P<open>\\\{|[(\[{])|(?P<close>\\\}|[)\]}])|\\[a-zA-Z]+|\\."
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_NAME = r"(?:[A-Za-z]|\\(?!(?:in|approx|simeq)\b)[a-zA-Z]+)(?:_(?:\w|\{[^{}]*\}))?"
_ASSIGNED = re.compile(
    rf"^(?:\\angle[ A-Z_0-9{{}}]+|\(\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\)|{_NAME}(?:\s*\([^()=]*\))?)"
    r"\s*(?:=|\\(?:in|approx|simeq)(?![a-zA-Z]))\s*(?P<value>[^=]+)$"
)
_WRAPPED = r"\\(?:text|textrm|textit|mathrm|mbox|operatorname|rm)\s*\{(?!\s*[ei]\s*\})(?:[^{}]|\{[^{}]*\})*\}"
_UNIT = re.compile(rf"^(?P<value>.*?\S)\s*{_WRAPPED}(?:\s|{_WRAPPED}|/|\\cdot|\\times|\^\s*\{{?-?\d+\}}?)*$")
_PLAIN_UNIT = re.compile(r"^(?P<value>.*\d\}?)\s+(?![xyznktie]\b)[A-Za-zµΩ][A-Za-zµΩ/*^ \d-]*$")
_PLAIN_NUMBER = re.compile(
    rf"^(?P<sign>[+-]?)\s*(?:(?P<number>{_DECIMAL})(?:\s*(?:\\times|\\cdot|\*)\s*(?P<power>10\s*\^\s*\{{?\s*([+-]?\d+)\s*\}}?))?"
    r"|(?P<bare>10\s*\^\s*\{\s*([+-]?\d+)\s*\}))$"
)
MAX_EXPONENT = 4000  # of a power of ten written out as a fraction; larger ones are sympy's, under the reading's alarm


def tidy(text: str) -> str:
    """One spelling of LaTeX's many: delimiters, spaces, degrees, e-notation; a trailing full stop goes."""
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,;").strip()


def split_list(text: str) -> list[str]:
    """The elements of a list: split at commas, semicolons, "and" and "or" outside all brackets; {1, 2} is 1, 2."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token["open"]:
            depth += 1
        elif token["close"]:
            depth -= 1
        elif token["separator"] and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    parts = [part.strip() for part in (*parts, text[start:]) if part.strip()]
    inside = braced(parts[0]) if len(parts) == 1 else None
    return parts if inside is None else split_list(inside)


def braced(text: str) -> str | None:
    """What a set's braces enclose, also after `x \\in`; None if `text` is no set."""
    value = assigned(text)
    return value[2:-2] if value.startswith("\\{") and value.endswith("\\}") and value.count("\\{") == 1 else None


def list_readings(text: str) -> list[list[str]]:
    """The ways to read `text` as a list: 1,234 as two numbers or one, \\pm as two answers with one sign or each."""
    readings = []
    for written in dict.fromkeys((text, _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text))):
        parts = split_list(written)
        readings.append(parts)
        if "\\pm" in written and written.count("\\pm") <= 4:
            readings.append([signed for part in parts for signed in _signs(part, together=True)])
            readings.append([signed for part in parts for signed in _signs(part, together=False)])
    return readings


def _signs(text: str, *, together: bool) -> list[str]:
    pieces = re.split(r"\\pm(?![a-zA-Z])\s*", text)
    free = 1 if together and len(pieces) > 1 else len(pieces) - 1
    choices = product("+-", repeat=free)
    filled = []
    for signs in choices:
        signs = signs * (len(pieces) - 1) if together else signs
        filled.append(pieces[0] + "".join(sign + piece for sign, piece in zip(signs, pieces[1:], strict=True)))
    return filled


def assigned(text: str) -> str:
    """The right-hand side of `x = ...`, `f(x) = ...`, `(x, y) = ...`, `x \\in ...`; `text` itself if it is none."""
    match = _ASSIGNED.match(text.strip())
    return match["value"].strip() if match else text.strip()


def bracketed(text: str) -> tuple[str, list[str], str] | None:
    """(opening, parts, closing) of a tuple or interval with at least two parts; None for anything else."""
    text = text.strip()
    if len(text) < 5 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += bool(token["open"]) - bool(token["close"])
        if depth == 0 and token.end() < len(text) and token["close"]:
            return None  # (1, 2) \\cup (3, 4)
    parts = split_list(text[1:-1])
    return (text[0], parts, text[-1]) if len(parts) > 1 else None


def without_unit(text: str) -> str:
    """`text` without a unit at its end (\\text{ m/s}, \\mathrm{~J}, ` nm`); `text` itself if it has none."""
    for pattern in (_UNIT, _PLAIN_UNIT):
        match = pattern.match(text)
        if match:
            return match["value"]
    return text


def plain_number(text: str) -> Fraction | None:
    """The exact value of a decimal, a whole number or one times a power of ten; None for anything else."""
    match = _PLAIN_NUMBER.match(text)
    if match is None:
        return None
    power = match["power"] or match["bare"]
    exponent = int(re.search(r"\^\D*?([+-]?\d+)", power)[1]) if power else 0
    if abs(exponent) > MAX_EXPONENT:
        return None
    size = Fraction(match["number"] or 1) * Fraction(10) ** exponent
    return -size if match["sign"] == "-" else size
