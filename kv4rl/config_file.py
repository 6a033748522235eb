"""Settings from a file: .toml or .json, nested as the dataclasses of `config.py` are, or with dotted names."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

from kv4rl.config import InputError, require

READERS = {".json": json.loads, ".toml": tomllib.loads}


def read_settings(file: str | Path) -> dict[str, object]:
    """Dotted name -> value. Raises InputError for a file that is missing, or neither TOML nor a JSON object."""
    path = Path(file)
    require(path.suffix in READERS, "config", str(path), f"a name that ends in {' or '.join(READERS)}")
    try:
        settings = READERS[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"config={str(path)!r}: expected a {path.suffix[1:].upper()} file ({error})") from error
    require(isinstance(settings, dict), "config", str(path), "an object of settings by name")
    return dict(flatten(settings))


def flatten(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted name, value) of every leaf of nested dictionaries."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
