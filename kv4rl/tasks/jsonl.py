"""Reading .jsonl files: one object a line, and errors that name the line."""

import json
from pathlib import Path

from kv4rl.config import InputError, require


def read_jsonl(path: str | Path, *, content: bytes | None = None) -> list[tuple[str, dict]]:
    """("FILE:LINE", object) of every line that is not blank, in order; `content` are the file's bytes if known.

    Raises InputError, naming the line, for bytes that are no UTF-8, for a line that is no JSON object, and for a file
    without any; OSError if the file cannot be read.
    """
    path = Path(path)
    content = path.read_bytes() if content is None else content
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}={content[error.start : error.end]!r}: expected UTF-8 ({error})") from error
    records = []
    # Not splitlines: U+2028 and its like are no line ends in JSON, and stand inside strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            records.append((f"{path}:{number}", _object(f"{path}:{number}", line)))
    require(bool(records), "file", str(path), "at least one line, a JSON object")
    return records


def _object(where: str, line: str) -> dict:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where}={line[:60]!r}: expected one JSON object a line ({error})") from error
    require(isinstance(record, dict), where, line[:60], "a JSON object")
    return record
