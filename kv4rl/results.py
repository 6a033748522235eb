"""One tidy CSV an experiment: the only place where README, notebooks and the report find a number.

A row says what was measured, on what, when, and with which command; running that command makes the row again.
"""

import csv
import datetime
import functools
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from kv4rl.config import require

COLUMNS = (
    "experiment", "arm", "model", "shape", "metric", "unit", "value", "low", "high", "n", "scope",
    "hardware", "torch", "commit", "date", "command",
)  # fmt: skip
KEY = ("experiment", "arm", "model", "shape", "metric", "scope", "hardware")
SCOPES = ("measured", "simulated", "reported")
GIVEN = ("experiment", "arm", "model", "shape", "metric", "unit", "value", "scope")

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "data" / "results"


def result_row(*, scope: str = "measured", low="", high="", n="", command: str | None = None, **given) -> dict:
    """One row of a results file, with the machine, torch, commit, date and command filled in.

    Args: `experiment, arm, model, shape, metric, unit, value` by keyword; `low`/`high` bound the value (95 % unless
    the experiment says otherwise); `n` counts what was averaged. Raises ValueError on a missing field, an unknown
    scope or a value that is not a finite number.
    """
    row = {"scope": scope, "low": low, "high": high, "n": n, **given}
    missing = [name for name in GIVEN if row.get(name) in (None, "")]
    require(not missing, "missing fields", missing, f"all of {', '.join(GIVEN)}")
    require(scope in SCOPES, "scope", scope, f"one of {', '.join(SCOPES)}")
    require(math.isfinite(float(row["value"])), "value", row["value"], "a finite number")
    stamp = {"hardware": hardware(), "torch": torch.__version__, "commit": commit(), "date": today()}
    return {name: row.get(name, "") for name in COLUMNS} | stamp | {"command": command or this_command()}


def write_rows(file: str | Path, rows: Iterable[Mapping], *, drop: Callable[[Mapping], bool] | None = None) -> Path:
    """Put `rows` (from `result_row`) into `data/results/<file>`, replacing those of equal key (`KEY`).

    Rows of the file for which `drop` holds go first: what an earlier, longer run of the same name left. The file is
    replaced in one move, so a reader never meets half of it. Returns its path.
    """
    path = Path(file) if Path(file).is_absolute() else RESULTS / file
    earlier = read_rows(path) if path.exists() else []
    kept = {tuple(row[name] for name in KEY): row for row in earlier if drop is None or not drop(row)}
    for row in rows:
        text = {name: format_value(row[name]) for name in COLUMNS}
        kept[tuple(text[name] for name in KEY)] = text
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".csv.partial")
    with partial.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())
    os.replace(partial, path)
    return path


def read_rows(file: str | Path, **equal: str) -> list[dict[str, str]]:
    """Rows of `data/results/<file>` whose columns equal the keywords given, in file order; values are strings."""
    path = Path(file) if Path(file).is_absolute() else RESULTS / file
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: run the command that makes it (README, 'Results')")
    with path.open(newline="", encoding="utf-8") as source:
        rows = list(csv.DictReader(source))
    absent = [name for name in COLUMNS if rows and name not in rows[0]]
    require(not absent, f"columns of {path.name}", list(rows[0]) if rows else [], f"also {', '.join(absent)}")
    return [row for row in rows if all(row[name] == value for name, value in equal.items())]


def latest(rows: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    """The newest of `rows` (by date; the later line wins a tie). Raises ValueError if there is none."""
    rows = list(rows)
    require(bool(rows), "rows", rows, "at least one row; run the command that makes it")
    return max(enumerate(rows), key=lambda pair: (pair[1]["date"], pair[0]))[1]


def format_value(value: object) -> str:
    """Six significant digits for floats, plain text for the rest."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@functools.cache
def hardware() -> str:
    """The accelerator's name and count, or the processor's and the cores this process may use."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count}x {torch.cuda.get_device_name(0)}" if count > 1 else torch.cuda.get_device_name(0)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


@functools.cache
def commit() -> str:
    """Short hash of the checkout, `+` appended when tracked files differ from it; `unknown` outside git."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "kv4rl", "kernels")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def today() -> str:
    """Today's date, ISO."""
    return datetime.date.today().isoformat()


def this_command() -> str:
    """The command line of this process, as a reader would type it: `python -m kv4rl.x …` for a module of ours.

    Of several ranks: `torchrun --nproc-per-node N -m kv4rl.x …`, on each of so many nodes.
    """
    script, words = Path(sys.argv[0]), sys.argv[1:]
    if not script.is_relative_to(REPOSITORY / "kv4rl"):
        return shlex.join([script.name, *words])
    module = ".".join(script.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__main__")
    ranks, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    start = ["python"] if ranks == "1" else ["torchrun", "--nproc-per-node", here]
    if ranks != here:
        start += ["--nnodes", str(int(ranks) // int(here))]
    return shlex.join([*start, "-m", module, *words])
