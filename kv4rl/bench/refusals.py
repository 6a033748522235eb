"""What every bench refuses before any work: counts that are slips, files it could not write, ranks and libraries amiss.

Each raises `InputError` (or the OSError of the file system), which `kv4rl.cli.one_sentence` turns into one sentence.
"""

import argparse
import csv
import os
import tempfile
from collections.abc import Iterable

from kv4rl.attention.backends import BackendUnavailable
from kv4rl.config import InputError, require, require_integer
from kv4rl.engine.flashinfer import import_flashinfer
from kv4rl.results import RESULTS, read_rows

LARGEST_COUNT = 1 << 24  # of anything counted on a command line: more is a slip of the keyboard, or would run for years
MOST_AT_ONCE = 1 << 20  # responses of an interval, rows of a batch


def require_counts(options: argparse.Namespace, **least: int) -> None:
    """Each option named is an integer of at least what is given for it, and of a size that can be meant."""
    for name, number in least.items():
        value, flag = getattr(options, name), name.replace("_", "-")
        require_integer(value, flag, number)
        require(value <= LARGEST_COUNT, flag, value, f"at most {LARGEST_COUNT}")


def require_writable(out: str) -> None:
    """The rows can be put into this file: its folder is made, a file that is there holds rows."""
    path = RESULTS / out  # an absolute path stays itself
    require(not path.is_dir(), "out", out, "a CSV file, not a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):  # raises where nothing can be written
        pass
    if path.exists():
        try:
            read_rows(path)
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"out={out!r}: expected a CSV file of results ({error})") from error


def require_ranks(tp: int) -> None:
    """Exactly the processes of one tensor-parallel group: this bench measures no replicas."""
    started = int(os.environ.get("WORLD_SIZE", tp))
    require(started == tp, "tp", tp, f"{started}, the number of processes that torchrun started")


def require_flashinfer(arms: Iterable[str], device_type: str) -> None:
    """FlashInfer is there if one of `arms` is decoded through it: on CUDA, where nothing is measured in its place."""
    needing = list(arms)
    if not needing or device_type != "cuda":
        return
    try:
        import_flashinfer()
    except BackendUnavailable as reason:
        raise InputError(f"arms={needing}: {reason}") from reason
