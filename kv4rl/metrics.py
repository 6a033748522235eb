"""Where a run's figures go: `metrics.jsonl`, one line an update, and TensorBoard; and the clock behind `timing_s/*`."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from kv4rl.config import InputError
from kv4rl.disk import writing

FILE = "metrics.jsonl"
WALL_CLOCK = ("timing_s/", "perf/")  # the only metrics that two runs of one command may differ in


class Timers:
    """Seconds spent in named phases; on CUDA each ends when the device has finished its work."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._device = torch.device(device)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to `seconds[name]`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>` for every phase, in seconds."""
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}


class MetricsWriter:
    """Appends updates to `<directory>/metrics.jsonl` and to TensorBoard events in `<directory>/tensorboard`.

    `resumed_update`: lines of later updates, and a line that a kill cut short, are dropped, because the run repeats
    them. None starts afresh.
    """

    def __init__(self, directory: str | Path, *, resumed_update: int | None = None):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE
        kept = [line for line in _whole_lines(path) if resumed_update is not None and line["update"] <= resumed_update]
        _replace(path, "".join(_encode(line) for line in kept))
        self._file = path.open("a")
        purge = 0 if resumed_update is None else resumed_update + 1
        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=purge)

    def write(self, update: int, metrics: Mapping[str, float | list]) -> None:
        """One line, durable when this returns. Lists (histograms) go to the file only; NaN and infinity become null.

        Raises NotWritten, naming the file, when it cannot.
        """
        with writing(self._file.name):
            self._file.write(_encode({"update": update, **metrics}))
            self._file.flush()
            os.fsync(self._file.fileno())
        with writing(self._events.log_dir):
            for name, value in metrics.items():
                if not isinstance(value, list):
                    self._events.add_scalar(name, value, update)
            self._events.flush()

    def close(self) -> None:
        with writing(self._file.name):
            self._file.close()
        with writing(self._events.log_dir):
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def read_metrics(directory: str | Path) -> list[dict]:
    """The lines of a run, in update order; an unfinished last line is left out. Empty without a file.

    Raises InputError, naming file and line, for a damaged one.
    """
    return list(_whole_lines(Path(directory) / FILE))


def without_wall_clock(line: Mapping) -> dict:
    """A metrics line without the entries that depend on the clock: what determinism promises to repeat."""
    return {name: value for name, value in line.items() if not name.startswith(WALL_CLOCK)}


def summary(name: str, values: torch.Tensor) -> dict[str, float]:
    """`name/mean`, `name/max`, `name/min` of a non-empty tensor."""
    values = values.double()
    return {f"{name}/{key}": float(getattr(values, key)()) for key in ("mean", "max", "min")}


def _whole_lines(path: Path) -> Iterator[dict]:
    """The updates of a file; `InputError`, naming file and line, for a line that is none."""
    content = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise _damaged(path, number, line) from error
        if not isinstance(entry, dict) or type(entry.get("update")) is not int:
            raise _damaged(path, number, line)
        yield entry


def _damaged(path: Path, number: int, line: bytes) -> InputError:
    shown = line[:60].decode("utf-8", "replace")
    return InputError(f"{path}:{number}={shown!r}: expected an update's metrics; delete the line to go on without it")


def _encode(line: Mapping) -> str:
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write the file whole or leave the old one: a kill in between must not lose earlier lines."""
    partial = path.with_suffix(".partial")
    with writing(path):
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
