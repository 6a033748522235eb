"""Sums of three one-digit numbers in words, for SmolLM2-135M: the task that GRPO can teach it.

A prompt is a chat of worked examples, 240 tokens or so, and then the problem:

    What is 6 + 8 + 5?
    6 + 8 = 14. 14 + 5 = 19. The answer is \\boxed{19}.

The weights that `kv4rl.model.fetch` makes answer one in five right at temperature 1, and more than half of the groups
of eight hold right and wrong answers alike, which is what an advantage needs. Four numbers, two-digit numbers, counting
and comparing were tried: one answer in seven or fewer.

The preset reads the last box alone: as an expression "6 + 8 + 5" is worth its sum, which a policy soon finds out. A
boxed "6 + 8 + 5" still earns the reward, so look at responses before calling a rise arithmetic.
"""

import hashlib
import itertools
import json

from transformers import PreTrainedTokenizerBase

from kv4rl.config import require
from kv4rl.tasks.mini import SPLITS
from kv4rl.tasks.stream import TaskStream

DIGITS = range(1, 10)
EXAMPLES = ((4, 7, 2), (9, 8, 6), (3, 5, 1), (8, 2, 7))  # shown in every prompt, never asked
EVALUATION_SHARE = 1 / 5

Terms = tuple[int, int, int]


def question(terms: Terms) -> str:
    return "What is {} + {} + {}?".format(*terms)


def solution(terms: Terms) -> str:
    """The worked answer, as the examples show it."""
    a, b, c = terms
    return f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}. The answer is \\boxed{{{a + b + c}}}."


def split_of(terms: Terms) -> str:
    """`train` or `evaluation`, by a hash of the question."""
    digest = hashlib.sha256(question(terms).encode()).digest()
    return SPLITS[digest[0] < 256 * EVALUATION_SHARE]


def records(split: str) -> list[tuple[str, dict]]:
    """Every problem of a split as `TaskStream` takes them."""
    require(split in SPLITS, "split", split, f"one of {SPLITS}")
    asked = [t for t in itertools.product(DIGITS, repeat=3) if t not in EXAMPLES and split_of(t) == split]
    return [(f"sums:{i}", _record(terms)) for i, terms in enumerate(asked, start=1)]


def sums_stream(
    seed: int, tokenizer: PreTrainedTokenizerBase, *, split: str = "train", max_prompt_tokens: int = 512
) -> TaskStream:
    """The problems of a split, in an order of the seed's: training starts anew when all have been seen.

    Raises InputError for a tokenizer without a chat template.
    """
    made, once = records(split), split == "evaluation"
    identity = json.dumps([record for _, record in made]).encode()
    return TaskStream(
        "sums", made, identity, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens, shuffle=not once,
        epochs=1 if once else None,
    )  # fmt: skip


def _record(terms: Terms) -> dict:
    shown = [text for example in EXAMPLES for text in (question(example), solution(example))]
    roles = itertools.cycle(("user", "assistant"))
    chat = [{"role": role, "content": text} for role, text in zip(roles, [*shown, question(terms)], strict=False)]
    return {"prompt_id": "sums-" + "-".join(map(str, terms)), "prompt": chat, "answer": str(sum(terms))}
