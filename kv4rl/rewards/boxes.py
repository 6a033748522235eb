"""Finds the box that holds a response's answer. No sympy here: the trainer imports it too."""

import re

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed{...}` (or `\\fbox{...}`) whose braces balance; None if there is none.

    Escaped braces do not count; of nested boxes the inner one is the last. One pass, linear in the length.
    """
    open_braces: list[tuple[bool, int]] = []  # (opens a box, where its content starts)
    found: tuple[int, int] | None = None
    for token in _BOX_OR_BRACE.finditer(text):
        word = token.group()
        if word.endswith("{") and word != "\\{":
            open_braces.append((word != "{", token.end()))
        elif word == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box and (found is None or start > found[0]):
                found = (start, token.start())
    return None if found is None else text[found[0] : found[1]]
