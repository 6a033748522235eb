"""Finished problems of one set and seed, an append-only .jsonl file: what a killed evaluation continues from.

The first line holds the settings that decide the scores, and the commit; every other line one problem, written when
the last of its k responses is graded. A line that a kill cut short is dropped, and its problem done again.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path

import numpy as np

from kv4rl.config import InputError, require
from kv4rl.disk import writing
from kv4rl.evaluation.evaluate import EvaluationResult
from kv4rl.results import commit

BEGINNING = b'{"settings": '
FIRST_LINE = "an evaluation's settings, or a file that does not exist yet: give another --output or remove it"


@dataclass(frozen=True)
class Record:
    """One problem's k graded responses; lists in the order of the siblings."""

    problem_id: str
    verl: list[float]  # 0 or 1, as `last_box`
    last_box: list[float]
    has_box: list[bool]
    truncated: list[bool]  # ended by the length cap
    response_tokens: list[int]
    grading_failures: int  # timeouts and worker deaths, scored 0


class RecordFile:
    """Appends records to `path`, one writer at a time; `done` holds those of earlier runs too.

    Raises `InputError` if the file was begun with other settings (named) or is being written, OSError if it cannot be.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]):
        self.path = path
        self.done: dict[str, Record] = {}
        self.commit = commit()  # at which the file was begun: the rows that are made of it name today's
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._lock()
            self._read(dict(settings))
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"output={str(self.path)!r}: expected a file that no other evaluation writes") from error

    def _read(self, settings: dict) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines:
            self._require(BEGINNING.startswith(content[: len(BEGINNING)]), 1, content, FIRST_LINE)
            self._file.truncate(0)
            self._write({"settings": settings, "commit": self.commit})
            return
        first = _parsed(lines[0])
        is_first = isinstance(first.get("settings"), dict) and first.get("settings") and "commit" in first
        self._require(is_first, 1, lines[0], FIRST_LINE)
        begun, self.commit = first["settings"], first["commit"]
        for name in sorted(settings.keys() | begun.keys()):
            same = settings.get(name) == begun.get(name)
            expected = f"{begun.get(name)!r}, with which {self.path} was begun (or another --output)"
            require(same, name, settings.get(name), expected)
        for number, line in enumerate(lines[1:], start=2):
            entry = _parsed(line)
            whole_record = _is_record(entry, settings.get("samples"))
            self._require(whole_record, number, line, "the record of one problem: delete the line to do it again")
            self.done[entry["problem_id"]] = Record(**entry)
        self._file.truncate(len(whole))

    def _require(self, condition: object, number: int, line: bytes, expected: str) -> None:
        require(bool(condition), f"{self.path}:{number}", line[:60].decode("utf-8", "replace"), expected)

    def append(self, record: Record) -> None:
        """Write a finished problem; it survives the process from here on."""
        self._write(asdict(record))
        self.done[record.problem_id] = record

    def _write(self, entry: dict) -> None:
        with writing(self.path):
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Flush to the disk and let others write."""
        with writing(self.path):
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _parsed(line: bytes) -> dict:
    """The object of a line; an empty one if it holds none."""
    try:
        entry = json.loads(line.decode("utf-8"))
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _is_record(entry: dict, samples: int | None) -> bool:
    """Whether it has the fields of a `Record`, and in each list an entry of its kind for each of k siblings."""
    if entry.keys() != {field.name for field in fields(Record)} or not isinstance(entry["problem_id"], str):
        return False
    lists = {name: entry[name] for name in ("verl", "last_box", "has_box", "truncated", "response_tokens")}
    if not all(isinstance(values, list) and len(values) > 0 for values in lists.values()):
        return False
    if {len(values) for values in lists.values()} != {samples or len(lists["verl"])}:
        return False
    tokens = lists.pop("response_tokens")
    counts = all(type(count) is int and count >= 0 for count in (*tokens, entry["grading_failures"]))
    return counts and all(isinstance(value, int | float) and value in (0, 1) for value in chain(*lists.values()))


def result_of(records: Sequence[Record]) -> EvaluationResult:
    """The scores of all problems, rows in the order given."""
    column = lambda name, kind: np.array([getattr(record, name) for record in records], dtype=kind)
    return EvaluationResult(
        verl=column("verl", np.float64),
        last_box=column("last_box", np.float64),
        has_box=column("has_box", bool),
        truncated=column("truncated", bool),
        response_tokens=column("response_tokens", np.int64),
        grading_failures=sum(record.grading_failures for record in records),
    )
