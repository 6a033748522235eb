"""A benchmark question as token ids."""

from transformers import PreTrainedTokenizerBase

from kv4rl.config import require
from kv4rl.tasks.tokenizer import unknown_characters


def prompt_tokens(
    text: str, problem_id: str, tokenizer: PreTrainedTokenizerBase, limit: int, *, special: bool = True
) -> list[int]:
    """The prompt's ids; `InputError` if they are more than `limit`, or the tokenizer lacks a character.

    special: add what the tokenizer begins a text with; a chat template has done so already.
    """
    unknown = unknown_characters(tokenizer, text)
    where = f"prompt of {problem_id}"
    require(not unknown, where, "".join(unknown[:20]), "only characters that the model's tokenizer knows")
    tokens = tokenizer.encode(text, add_special_tokens=special)
    require(1 <= len(tokens) <= limit, f"tokens in the {where}", len(tokens), f"at least 1, at most {limit}")
    return tokens
