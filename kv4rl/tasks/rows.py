"""Rows of a data set: from a local .jsonl or .parquet file, or from the hub by name (`datasets`, optional)."""

from collections.abc import Sequence
from pathlib import Path

from kv4rl.config import InputError, require
from kv4rl.tasks.jsonl import read_jsonl

SUFFIXES = (".jsonl", ".parquet")


def read_file(path: str | Path) -> list[tuple[str, dict]]:
    """("FILE:NUMBER", row) of a local file, in its order. `InputError` names the file, and the line, that is wrong."""
    path = Path(path)
    require(path.suffix in SUFFIXES, "data file", str(path), f"a name that ends in {' or '.join(SUFFIXES)}")
    require(path.is_file(), "data file", str(path), "a file that exists")
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    rows = _read_parquet(path)
    require(bool(rows), "data file", str(path), "at least one row")
    return numbered(rows, str(path))


def numbered(rows: Sequence[dict], source: str) -> list[tuple[str, dict]]:
    """Rows with the place that an error names."""
    return [(f"{source}:{number}", row) for number, row in enumerate(rows, start=1)]


def _read_parquet(path: Path) -> list[dict]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise InputError(f"data file={str(path)!r}: parquet needs pyarrow: pip install 'kv4rl[data]'") from error
    try:
        return read_table(path).to_pylist()
    except ArrowException as error:
        raise InputError(f"data file={str(path)!r}: expected a whole parquet file ({error})") from error


def read_hub(name: str, *, split: str, config: str | None = None, instead: str) -> list[tuple[str, dict]]:
    """("NAME:NUMBER", row) of the hub data set `name`, in its order; no code of the data set is run.

    Raises `InputError` without the `datasets` package or for a name, configuration or split that the hub does not
    have, ConnectionError when it cannot be reached; both messages end in `instead`, which local file would do.
    """
    try:
        import datasets
    except ImportError as error:
        fix = "pip install 'kv4rl[data]'"
        raise InputError(f"data set={name!r}: needs the datasets package ({fix}), or {instead}") from error
    try:
        return numbered(list(datasets.load_dataset(name, config, split=split)), name)
    except (ValueError, FileNotFoundError) as error:  # what `datasets` raises for names it does not find
        raise InputError(f"data set={name!r}: expected one with {split!r} ({_brief(error)}), or {instead}") from error
    except OSError as error:
        raise ConnectionError(
            f"data set={name!r}: the hub did not deliver it ({_brief(error)}). Fix: allow network access (and unset "
            f"HF_HUB_OFFLINE), or {instead}"
        ) from error


def _brief(error: Exception) -> str:
    return str(error).partition("\n")[0]


def field(row: dict, names: Sequence[str]) -> object | None:
    """The first of `names` that the row has a value for, whatever its case; None if it has none of them."""
    lowered = {key.lower(): value for key, value in row.items()}
    return next((lowered[name] for name in names if lowered.get(name) is not None), None)
