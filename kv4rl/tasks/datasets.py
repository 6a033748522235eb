"""Training data of §B.1: the English split of DAPO-Math-17k-Processed from the hub, or a local file with its fields.

Every problem gets the boxed-answer instruction once, without a chat template. Rows whose gold answer the grader cannot
use, and prompts beyond the limit, are left out, counted and named in `left_out`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kv4rl.config import require
from kv4rl.rewards.boxes import last_box
from kv4rl.rollout.group import PromptStream
from kv4rl.tasks.instruction import with_instruction
from kv4rl.tasks.rows import SUFFIXES, field, read_file, read_hub
from kv4rl.tasks.stream import JsonlStream, LeftOut, MiniStream, TaskStream, require_known
from kv4rl.tasks.sums import sums_stream

DAPO = "open-r1/DAPO-Math-17k-Processed"
ENGLISH, SPLIT = "en", "train"
MADE = ("mini", "sums")  # tasks without a file


def open_stream(tasks: str, tokenizer: PreTrainedTokenizerBase, *, seed: int, max_prompt_tokens: int) -> PromptStream:
    """The prompts that a configuration's `tasks` names, their golds checked.

    `mini` and `sums` are made here. A .jsonl task file, whose `prompt` is whole and whose gold is `answer`; else a data
    set: a .jsonl or .parquet file with the fields of DAPO-Math-17k-Processed, or a hub id `owner/name`.
    """
    if tasks in MADE:
        return _made(tasks, tokenizer, seed=seed, split="train", max_prompt_tokens=max_prompt_tokens)
    path = Path(tasks)
    require(not path.is_dir(), "tasks", tasks, f"{_named()}; this is a folder")
    if path.suffix not in SUFFIXES:
        known = len(tasks.split("/")) == 2 and all(tasks.split("/"))
        require(known, "tasks", tasks, _named())
        return DataSetStream(tasks, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens)
    require(path.is_file(), "tasks", tasks, _named())
    if path.suffix == ".jsonl" and {"prompt", "answer"} <= read_file(path)[0][1].keys():
        return JsonlStream(path, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens, check_golds=True)
    return DataSetStream(path, tokenizer, seed=seed, max_prompt_tokens=max_prompt_tokens)


def _named() -> str:
    return f'{", ".join(MADE)}, a .jsonl or .parquet file that exists, or a hub id such as "{DAPO}"'


def held_out_stream(
    tasks: str, tokenizer: PreTrainedTokenizerBase, *, seed: int, max_prompt_tokens: int
) -> TaskStream | MiniStream | None:
    """Prompts that `tasks` keeps for evaluation, or those of `<tasks>.evaluation.jsonl`; None without either."""
    if tasks in MADE:
        return _made(tasks, tokenizer, seed=seed, split="evaluation", max_prompt_tokens=max_prompt_tokens)
    path = evaluation_file(tasks)
    if not path.is_file():
        return None
    given = {"max_prompt_tokens": max_prompt_tokens, "shuffle": False, "epochs": 1, "check_golds": True}
    return JsonlStream(path, tokenizer, **given)


def evaluation_file(tasks: str) -> Path:
    """Where the held-out problems of a task file are looked for."""
    return Path(tasks).with_suffix(".evaluation.jsonl")


def _made(tasks: str, tokenizer, *, seed: int, split: str, max_prompt_tokens: int) -> TaskStream | MiniStream:
    if tasks == "mini":
        return MiniStream(seed, split=split, tokenizer=tokenizer)
    return sums_stream(seed, tokenizer, split=split, max_prompt_tokens=max_prompt_tokens)


class DataSetStream(TaskStream):
    """Prompts of a data set of problems, shuffled anew every epoch (`PromptStream`).

    source: a hub id (its English configuration) or a local .jsonl or .parquet file. Fields: `prompt` (or `problem`,
    `question`; text, or messages of which the last counts) and `solution` (or `answer`, or verl's
    `reward_model.ground_truth`), the final answer or a text that boxes it.
    Raises InputError naming the row that lacks a field; ConnectionError if the hub does not deliver.
    """

    def __init__(
        self, source: str | Path, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int = 1024, **options
    ):
        if Path(source).suffix in SUFFIXES:
            rows = read_file(source)
        else:
            instead = "give a local .jsonl or .parquet file of the same fields as `tasks`"
            rows = read_hub(str(source), config=ENGLISH, split=SPLIT, instead=instead)
        name = Path(source).stem if Path(source).suffix in SUFFIXES else str(source).rpartition("/")[2]
        records = [(where, _task(where, row, f"{name}-{i}")) for i, (where, row) in enumerate(rows, start=1)]
        kept, too_long = _within(records, tokenizer, max_prompt_tokens)
        identity = json.dumps([record for _, record in records]).encode()
        super().__init__(
            source, kept, identity, tokenizer, max_prompt_tokens=max_prompt_tokens, check_golds=True, **options
        )
        self.left_out = too_long + self.left_out


def _task(where: str, row: Mapping, prompt_id: str) -> dict:
    text = field(row, ("prompt", "problem", "question"))
    if isinstance(text, list):
        text = text[-1].get("content") if text and isinstance(text[-1], dict) else None
    require(isinstance(text, str) and bool(text.strip()), f"{where} fields", sorted(row), "also `prompt`, a text")
    model = field(row, ("reward_model",))
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    given = (truth, field(row, ("answer",)), field(row, ("solution",)))
    gold = next((gold for gold in given if gold not in (None, "")), None)
    if isinstance(gold, str):
        gold = (last_box(gold) or gold).strip()
    usable = isinstance(gold, str | int | float) and not isinstance(gold, bool) and gold != ""
    require(usable, f"{where} fields", sorted(row), "also `solution` (or `answer`), the gold")
    return {"prompt_id": prompt_id, "prompt": with_instruction(text), "answer": str(gold)}


def _within(
    records: list[tuple[str, dict]], tokenizer: PreTrainedTokenizerBase, limit: int
) -> tuple[list[tuple[str, dict]], list[LeftOut]]:
    """The records whose prompts fit, and the others; `InputError` if none does, or one has unknown characters."""
    for where, record in records:
        require_known(where, record["prompt"], tokenizer)
    lengths = [len(ids) for ids in tokenizer([record["prompt"] for _, record in records])["input_ids"]]
    kept = [record for record, length in zip(records, lengths, strict=True) if length <= limit]
    require(bool(kept), "max_prompt_tokens", limit, f"at least {min(lengths)}, the shortest prompt's length")
    reason = f"a prompt of {{}} tokens: expected at most max_prompt_tokens={limit}"
    long = [(where, length) for (where, _), length in zip(records, lengths, strict=True) if length > limit]
    return kept, [LeftOut(where, reason.format(length)) for where, length in long]
