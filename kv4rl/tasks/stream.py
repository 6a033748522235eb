"""Prompt streams: endless mini tasks from a seed, and the lines of a .jsonl file."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kv4rl.config import require
from kv4rl.rollout.group import Prompt, PromptStream
from kv4rl.tasks.golds import unusable_golds
from kv4rl.tasks.jsonl import read_jsonl
from kv4rl.tasks.mini import SPLITS, MiniProblem, draw_problem
from kv4rl.tasks.tokenizer import build_tokenizer, unknown_characters


def mini_problem(seed: int, split: str, index: int) -> MiniProblem:
    """Problem number `index` of the endless list that `seed` and `split` name."""
    return draw_problem(random.Random(f"mini {seed} {split} {index}"), split)


def mini_problems(seed: int, split: str, count: int) -> list[MiniProblem]:
    """The first `count` problems of that list."""
    return [mini_problem(seed, split, index) for index in range(count)]


def take(stream: PromptStream, count: int) -> list[Prompt]:
    """The next `count` prompts of a stream."""
    return [stream.next() for _ in range(count)]


@dataclass(frozen=True)
class LeftOut:
    """A line of a task file that is not trained on."""

    where: str  # file and line
    reason: str  # names its gold answer, and what is wrong with it


class MiniStream:
    """Mini tasks without end (`PromptStream`). The k-th prompt depends on seed, split and k alone.

    `split` is `train` or `evaluation`; the two share no prompt.
    """

    left_out: tuple[LeftOut, ...] = ()  # every mini task can be graded
    size = None  # different prompts: without end

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


class TaskStream:
    """Prompts of a list of records, in a new order every epoch (`PromptStream`); never ends unless `epochs` says so.

    Each record is ("FILE:LINE", object) with `prompt` (text, or a list of chat messages for the tokenizer's chat
    template) and `answer` (text or a number), and optionally `prompt_id`; `identity` are the bytes they came from.
    Raises InputError at once, naming line and field, on an object that has them not, an id given twice, characters the
    tokenizer does not know, and a prompt of more than `max_prompt_tokens`.

    With `check_golds`, lines whose answer the grader cannot use are left out and listed in `left_out`; an error if no
    line remains.
    """

    def __init__(
        self,
        source: str | Path,
        records: Sequence[tuple[str, dict]],
        identity: bytes,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int = 1024,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        check_golds: bool = False,
    ):
        self.source, self.seed, self.shuffle, self.epochs = str(source), seed, shuffle, epochs
        lines = {where: _prompt_of(where, record, tokenizer, max_prompt_tokens) for where, record in records}
        _require_distinct_ids(lines)
        reasons = unusable_golds([prompt.answer for prompt in lines.values()]) if check_golds else {}
        self.left_out = [LeftOut(w, reasons[prompt.answer]) for w, prompt in lines.items() if prompt.answer in reasons]
        self._prompts = [prompt for prompt in lines.values() if prompt.answer not in reasons]
        first = self.left_out[0].reason if self.left_out else ""
        expected = f"at least one that the grader can use; none of {len(lines)} is, the first because of {first}"
        require(bool(self._prompts), f"answers of {self.source}", "all left out", expected)
        # A cursor means the same prompts only if the same ones were kept.
        kept = "".join(f"\0{prompt.prompt_id}" for prompt in self._prompts).encode()
        self._digest = hashlib.sha256(identity + kept).hexdigest()[:16]
        self._cursor, self._order = 0, []

    @property
    def size(self) -> int:
        """How many different prompts there are."""
        return len(self)

    def __len__(self) -> int:
        return len(self._prompts)

    def longest(self) -> Prompt:
        """The prompt of most tokens."""
        return max(self._prompts, key=lambda prompt: len(prompt.tokens))

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
        require(given == own, "state of (file, seed)", given, f"that of {self.source}, {own}")
        require(state["cursor"] >= 0, "cursor", state["cursor"], "an integer >= 0")
        self._cursor = state["cursor"]
        self._order = self._order_of(self._cursor // len(self._prompts))


class JsonlStream(TaskStream):
    """The tasks of a .jsonl file, one object a line; options and errors are `TaskStream`'s.

    Raises InputError also for a file that is not UTF-8, or without a line.
    """

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase, **options):
        content = Path(path).read_bytes()
        super().__init__(path, read_jsonl(path, content=content), content, tokenizer, **options)


def _prompt_of(where: str, record: dict, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> Prompt:
    missing = [name for name in ("prompt", "answer") if name not in record]
    require(not missing, f"{where} fields", sorted(record), f"also {', '.join(missing)}")
    given, answer = record["prompt"], record["answer"]
    number = isinstance(answer, int | float) and not isinstance(answer, bool)
    require(number or (isinstance(answer, str) and bool(answer.strip())), f"{where} answer", answer, "text or a number")
    prompt_id = record.get("prompt_id", f"{Path(where).stem}-{where.rpartition(':')[2]}")
    named = isinstance(prompt_id, str | int) and not isinstance(prompt_id, bool) and prompt_id != ""
    require(named, f"{where} prompt_id", prompt_id, "text or a whole number, or no such field")
    text = _chat_text(where, given, tokenizer) if isinstance(given, list) else given
    require(isinstance(text, str) and bool(text), f"{where} prompt", given, "text or a list of chat messages")
    tokens = _encode(where, text, tokenizer, add_special_tokens=not isinstance(given, list))
    fits = 1 <= len(tokens) <= max_prompt_tokens
    require(fits, f"{where} prompt tokens", len(tokens), f"at least 1, at most max_prompt_tokens={max_prompt_tokens}")
    return Prompt(str(prompt_id), tokens, str(answer), text)


def _chat_text(where: str, messages: list, tokenizer: PreTrainedTokenizerBase) -> str:
    has_template = bool(tokenizer.chat_template)
    require(has_template, f"{where} prompt", "a list of messages", "plain text: this tokenizer has no chat template")
    whole = all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    whole = whole and all(isinstance(m.get("content"), str) for m in messages) and bool(messages)
    require(whole, f"{where} prompt", messages, "messages: objects with `role` and `content`, both of them text")
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _encode(where: str, text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool) -> list[int]:
    require_known(where, text, tokenizer)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def require_known(where: str, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` for characters of a prompt that the tokenizer has no token for."""
    unknown = unknown_characters(tokenizer, text)
    require(not unknown, f"{where} prompt", "".join(unknown[:20]), "only characters that the model's tokenizer knows")


def _require_distinct_ids(lines: dict[str, Prompt]) -> None:
    first: dict[str, str] = {}
    for where, prompt in lines.items():
        earlier = first.setdefault(prompt.prompt_id, where)
        expected = f"another id: {earlier} has this one, and the sampling noise is keyed by it"
        require(earlier == where, f"{where} prompt_id", prompt.prompt_id, expected)
