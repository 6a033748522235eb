"""Prompt streams: endless mini tasks from a seed, and the lines of a .jsonl file."""

import hashlib
import json
import random
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kv4rl.config import require
from kv4rl.rollout.group import Prompt, PromptStream
from kv4rl.tasks.mini import SPLITS, MiniProblem, draw_problem
from kv4rl.tasks.tokenizer import build_tokenizer


def mini_problem(seed: int, split: str, index: int) -> MiniProblem:
    """Problem number `index` of the endless list that `seed` and `split` name."""
    return draw_problem(random.Random(f"mini {seed} {split} {index}"), split)


def mini_problems(seed: int, split: str, count: int) -> list[MiniProblem]:
    """The first `count` problems of that list."""
    return [mini_problem(seed, split, index) for index in range(count)]


def take(stream: PromptStream, count: int) -> list[Prompt]:
    """The next `count` prompts of a stream."""
    return [stream.next() for _ in range(count)]


class MiniStream:
    """Mini tasks without end (`PromptStream`). The k-th prompt depends on seed, split and k alone.

    `split` is `train` or `evaluation`; the two share no prompt.
    """

    def __init__(self, seed: int, *, split: str = "train", tokenizer: PreTrainedTokenizerBase | None = None):
        require(split in SPLITS, "split", split, f"one of {SPLITS}")
        self.seed, self.split = seed, split
        self._tokenizer = tokenizer or build_tokenizer()
        self._cursor = 0

    def next(self) -> Prompt:
        self._cursor += 1
        return self._prompt(self._cursor - 1)

    def longest(self) -> Prompt:
        """A prompt as long as any: they all have the same number of characters."""
        return self._prompt(0)

    def _prompt(self, index: int) -> Prompt:
        problem = mini_problem(self.seed, self.split, index)
        prompt_id = f"mini-{self.split}-{self.seed}-{index}"
        return Prompt(prompt_id, self._tokenizer.encode(problem.prompt), problem.answer, problem.prompt)

    def state(self) -> dict:
        return {"seed": self.seed, "split": self.split, "cursor": self._cursor}

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken. Raises ValueError on the state of another seed or split."""
        given, own = (state["seed"], state["split"]), (self.seed, self.split)
        require(given == own, "state of (seed, split)", given, f"that of this stream, {own}")
        require(state["cursor"] >= 0, "cursor", state["cursor"], "an integer >= 0")
        self._cursor = state["cursor"]


class JsonlStream:
    """Prompts from a .jsonl file, in a new order every epoch (`PromptStream`); never ends unless `epochs` says so.

    Each line is an object with `prompt` (text, or a list of chat messages for the tokenizer's chat template) and
    `answer`, and optionally `prompt_id`. Raises ValueError at once, naming the line, on an empty file, a line that is
    no such object, and a prompt of more than `max_prompt_tokens`.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int = 1024,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ):
        self.path, self.seed, self.shuffle, self.epochs = Path(path), seed, shuffle, epochs
        content = self.path.read_bytes()
        self._digest = hashlib.sha256(content).hexdigest()[:16]
        lines = enumerate(content.decode("utf-8").splitlines(), start=1)
        self._prompts = [
            self._parse(line, number, tokenizer, max_prompt_tokens) for number, line in lines if line.strip()
        ]
        require(bool(self._prompts), "task file", str(self.path), "at least one line with `prompt` and `answer`")
        self._cursor, self._order = 0, []

    def __len__(self) -> int:
        return len(self._prompts)

    def longest(self) -> Prompt:
        """The prompt of most tokens."""
        return max(self._prompts, key=lambda prompt: len(prompt.tokens))

    def _parse(self, line: str, number: int, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> Prompt:
        where = f"{self.path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}={line[:60]!r}: expected one JSON object a line ({error})") from error
        require(isinstance(record, dict), where, line[:60], "a JSON object")
        missing = [name for name in ("prompt", "answer") if name not in record]
        require(not missing, f"{where} fields", sorted(record), f"also {', '.join(missing)}")
        text = record["prompt"]
        if isinstance(text, list):
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        require(isinstance(text, str) and bool(text), f"{where} prompt", text, "text or a list of chat messages")
        tokens = tokenizer.encode(text, add_special_tokens=not isinstance(record["prompt"], list))
        fits = 1 <= len(tokens) <= max_prompt_tokens
        require(fits, f"{where} prompt tokens", len(tokens), f"at most max_prompt_tokens={max_prompt_tokens}")
        return Prompt(str(record.get("prompt_id", f"{self.path.stem}-{number}")), tokens, str(record["answer"]), text)

    def next(self) -> Prompt:
        """The next prompt; `StopIteration` after `epochs`. From the second epoch on, ids end in `@epoch`."""
        epoch, index = divmod(self._cursor, len(self._prompts))
        if self.epochs is not None and epoch >= self.epochs:
            raise StopIteration
        if index == 0 or not self._order:
            self._order = self._order_of(epoch)
        self._cursor += 1
        prompt = self._prompts[self._order[index]]
        # The sampling noise is keyed by the id: a second visit under the same id would repeat the first one's draws.
        name = f"{prompt.prompt_id}@{epoch}" if epoch else prompt.prompt_id
        return Prompt(name, prompt.tokens, prompt.answer, prompt.text)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self.shuffle:
            random.Random(f"jsonl {self.seed} {epoch}").shuffle(order)
        return order

    def state(self) -> dict:
        return {"file": self._digest, "seed": self.seed, "cursor": self._cursor}

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken. Raises ValueError if the file's content or the seed is another."""
        given, own = (state["file"], state["seed"]), (self._digest, self.seed)
        require(given == own, "state of (file, seed)", given, f"that of {self.path}, {own}")
        require(state["cursor"] >= 0, "cursor", state["cursor"], "an integer >= 0")
        self._cursor = state["cursor"]
        self._order = self._order_of(self._cursor // len(self._prompts))
