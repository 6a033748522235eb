"""The boxed-answer instruction of §B.1, on every prompt exactly once, whatever a row already carries."""

import re

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."

_OURS = re.compile(
    r"\s*Let[’']?s\s+think\s+step\s+by\s+step\s+and\s+output\s+the\s+final\s+answer\s+within\s+\\?boxed\s*\{\s*\}\s*\.?",
    re.IGNORECASE,
)
# DAPO-Math-17k as published asks for an "Answer:" line instead; its processed version mostly has this removed.
_ANSWER_LINE = re.compile(
    r"^\s*Solve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \\?\$Answer \(without quotes\) where \\?\$Answer is the answer to the problem\.\s*"
    r"|\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$"
)
_ANOTHER = re.compile(r"\banswer\b[^\n]{0,60}?\\boxed\s*\{\s*(?:\.\.\.|\\ldots|\\cdot)?\s*\}", re.IGNORECASE)


def with_instruction(problem: str) -> str:
    """The problem's text, then the instruction: once, also if the row has it already, once or more often.

    DAPO's own answer template is taken off; a row that asks for a boxed answer in other words is left as it is.
    """
    bare = _OURS.sub("", _ANSWER_LINE.sub("", problem)).strip()
    return bare if _ANOTHER.search(bare) else f"{bare} {INSTRUCTION}"
