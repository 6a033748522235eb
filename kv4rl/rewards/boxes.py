"""Finds the box that holds a response's answer. No sympy here: the trainer imports it too."""

import re
from collections.abc import Iterator

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(  # what may stand between the boxes of one list: `} $, and y = $\\boxed{`
    r"\}[\s,;$&]*(?:\\[()\[\],;]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|and|or)?[\s,;$&]*"
    r"(?:(?:and|or)\s*)?\$?(?:\\[(\[])?\s*(?:[A-Za-z](?:_\w|_\{\w+\})?\s*=\s*)?\\(?:boxed|fbox)\s*\{"
)


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed{...}` (or `\\fbox{...}`) whose braces balance; None if there is none.

    Escaped braces do not count; of nested boxes the inner one is the last. One pass, linear in the length.
    """
    found = max(_boxes(text), default=None)
    return None if found is None else text[found[0] : found[1]]


def closing_boxes(text: str) -> list[str]:
    """Contents of the boxes that end the response side by side, as in `\\boxed{1} and \\boxed{2}`; prose parts them."""
    contents: list[str] = []
    next_start: int | None = None
    for start, stop in sorted(_boxes(text), reverse=True):
        if next_start is not None and not _BETWEEN.fullmatch(text[stop:next_start]):
            break
        contents.insert(0, text[start:stop])
        next_start = start
    return contents


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of the content of every balanced box."""
    open_braces: list[tuple[bool, int]] = []  # (opens a box, where its content starts)
    for token in _BOX_OR_BRACE.finditer(text):
        word = token.group()
        if word.endswith("{") and word != "\\{":
            open_braces.append((word != "{", token.end()))
        elif word == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box:
                yield start, token.start()
