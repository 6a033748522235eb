"""Checkpoints that are whole or absent: one directory an update, written aside, synced to disk, then renamed.

    update_000012/
      model.safetensors   FP32 master weights under the model's names
      optimizer.pt        AdamW's state, loaded with weights_only
      pool.safetensors    the number arrays of `run` below: tokens, log-probs, versions of every response held
      state.json          everything else: configuration, counters, prompt cursor, ages, scores
      digests.json        of these four: damage is noticed before anything is computed with it

A kill at any point, or a full disk, leaves the previous directory as it was. `only_run` keeps a second process out.
"""

import fcntl
import hashlib
import json
import os
import pickle
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kv4rl.checkpoint_digests import check_digests, write_digests
from kv4rl.config import InputError, TrainConfig, require
from kv4rl.config_file import flatten
from kv4rl.disk import NotWritten

FORMAT = 3  # 2: one collector a replica; 3: digests
PREFIX, PARTIAL = "update_", ".partial-"
ARRAY = "__array__"  # {ARRAY: name} in state.json stands for an array of pool.safetensors
MIN_ARRAY = 16  # shorter lists of numbers stay in state.json
# What reading a damaged file raises: json, safetensors and torch each in their own way.
DAMAGE = (
    OSError, ValueError, TypeError, KeyError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError,
)  # fmt: skip
# A run may go on with other values of these; every other field decides what the updates compute.
FREE_FIELDS = (
    "updates", "output_dir", "checkpoint_every", "keep_checkpoints",
    "evaluate_every", "evaluate_prompts", "evaluate_samples", "evaluate_sets", "memory", "tensor_parallel",
)  # fmt: skip


class CheckpointNotWritten(NotWritten):
    """A checkpoint could not be written (a full disk); the earlier ones are whole, and the run can go on from them."""


@dataclass
class Checkpoint:
    """One saved state. `run` is plain data (dicts, lists, numbers, strings) of collector, stream and counters."""

    update: int
    config: dict  # `settings(config)`
    weights: dict[str, torch.Tensor]
    optimizer: dict
    run: dict


def settings(config: TrainConfig) -> dict:
    """The fields that decide a run's course, flat, by dotted name, in the form JSON gives them back."""
    flat = {name: value for name, value in flatten(asdict(config)) if name not in FREE_FIELDS}
    return json.loads(json.dumps(flat))


def fingerprint(values: dict) -> str:
    """SHA-256 of settings: a short name for "the same configuration"."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def save_checkpoint(directory: str | Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write `checkpoint`, then remove all but the newest `keep`. Returns its directory.

    Raises CheckpointNotWritten, an OSError, when it cannot (a full disk), with earlier checkpoints untouched.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _remove_partial(directory)
    final = directory / f"{PREFIX}{checkpoint.update:06d}"
    partial = directory / f"{PARTIAL}{final.name}"
    try:
        partial.mkdir()
        _write(partial, checkpoint)
        os.replace(partial, final)
        _sync(directory)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors wrap a full disk in their own
        shutil.rmtree(partial, ignore_errors=True)
        left = [path.name for path in list_checkpoints(directory)]
        raise CheckpointNotWritten(
            f"checkpoint {final} could not be written ({error}); still whole: {', '.join(left) or 'none'}"
        ) from error
    for old in list_checkpoints(directory)[:-keep]:
        _remove(old)
    return final


class BackgroundSave:
    """Writes one checkpoint at a time in a thread of its own, so that a run goes on meanwhile.

    As a context it waits, at the end, for what is still being written.
    """

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None

    def start(self, directory: str | Path, checkpoint: Checkpoint, *, keep: int) -> None:
        """Begin to write `checkpoint`, whose tensors nobody may change before `finish`, which is called first."""
        self.finish()

        def write() -> None:
            try:
                self._path = save_checkpoint(directory, checkpoint, keep=keep)
            except BaseException as error:  # handed to whoever calls finish
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def finish(self) -> Path | None:
        """Wait; the directory of the checkpoint last written. Raises what the writing raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._path

    def __enter__(self) -> "BackgroundSave":
        return self

    def __exit__(self, kind, *exc) -> None:
        if self._thread is not None:
            self._thread.join()
        if kind is None:
            self.finish()


def list_checkpoints(directory: str | Path) -> list[Path]:
    """Complete checkpoints, oldest first; whatever else lies there is nobody's business."""
    numbers = ((re.fullmatch(rf"{PREFIX}(\d+)", path.name), path) for path in Path(directory).glob(f"{PREFIX}*"))
    return [path for _, path in sorted((int(found[1]), path) for found, path in numbers if found and path.is_dir())]


@contextmanager
def only_run(directory: str | Path) -> Iterator[None]:
    """Hold a run's folder (made if need be) while the block runs; InputError when another process holds it.

    The lock belongs to the process and goes with it, however it ends.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # A file of its own, open for writing: network file systems lock no directories.
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            expected = "a folder that no other process trains in: wait for that one, or choose another"
            raise InputError(f"output_dir={str(directory)!r}: expected {expected}") from error
        yield
    finally:
        os.close(descriptor)


def load_checkpoint(path: str | Path, config: TrainConfig) -> Checkpoint:
    """Read one checkpoint directory.

    Raises ValueError when it was made under another configuration, naming the fields that differ and both values, and
    when files of it are missing or damaged.
    """
    path = Path(path)
    try:
        state = dict(json.loads((path / "state.json").read_text()))
        require(state.get("format") == FORMAT, f"format of {path}", state.get("format"), f"{FORMAT}, this version's")
        check_settings(dict(state["config"]), settings(config), path)
        check_digests(path)
        return Checkpoint(
            update=state["update"],
            config=state["config"],
            weights=load_file(path / "model.safetensors"),
            optimizer=torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True),
            run=_join(state["run"], load_file(path / "pool.safetensors")),
        )
    except InputError:
        raise
    except DAMAGE as error:
        others = ", ".join(other.name for other in list_checkpoints(path.parent) if other != path)
        raise InputError(
            f"checkpoint={str(path)!r}: expected whole files ({error}); remove it to resume from "
            f"{others or 'the start: there is no other'}"
        ) from error


def check_settings(saved: dict, given: dict, path: Path) -> None:
    """Raise ValueError unless both are equal; one line a differing field."""
    lines = [
        f"  {name}: {saved.get(name, 'absent')!r} in the checkpoint, {given.get(name, 'absent')!r} now"
        for name in sorted(saved.keys() | given.keys())
        if saved.get(name, "absent") != given.get(name, "absent")
    ]
    if lines:
        raise InputError(
            f"checkpoint {path} was made with another configuration:\n"
            + "\n".join(lines)
            + "\nGive those values again, or choose another output_dir."
        )


def _write(directory: Path, checkpoint: Checkpoint) -> None:
    arrays: dict[str, torch.Tensor] = {}
    state = {
        "format": FORMAT,
        "update": checkpoint.update,
        "config": checkpoint.config,
        "fingerprint": fingerprint(checkpoint.config),
        "run": _split(checkpoint.run, "run", arrays),
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in checkpoint.weights.items()}, directory / "model.safetensors"
    )
    save_file(arrays, directory / "pool.safetensors")
    torch.save(checkpoint.optimizer, directory / "optimizer.pt")
    (directory / "state.json").write_text(json.dumps(state, indent=1))
    write_digests(directory)
    for path in [*directory.iterdir(), directory]:
        _sync(path)


def _split(value, name: str, arrays: dict[str, torch.Tensor]):
    """Move long lists of plain numbers out of a tree into `arrays`; a marker stays in their place."""
    if isinstance(value, dict):
        return {key: _split(entry, f"{name}.{key}", arrays) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        for kind, dtype in ((int, torch.int64), (float, torch.float64)):
            if len(value) >= MIN_ARRAY and all(type(entry) is kind for entry in value):
                arrays[name] = torch.tensor(value, dtype=dtype)
                return {ARRAY: name}
        return [_split(entry, f"{name}.{index}", arrays) for index, entry in enumerate(value)]
    return value


def _join(value, arrays: dict[str, torch.Tensor]):
    """Undo `_split`."""
    if isinstance(value, dict):
        if value.keys() == {ARRAY}:
            return arrays[value[ARRAY]].tolist()
        return {key: _join(entry, arrays) for key, entry in value.items()}
    if isinstance(value, list):
        return [_join(entry, arrays) for entry in value]
    return value


def _sync(path: Path) -> None:
    """Force a file's bytes, or a directory's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a complete checkpoint: out of sight first, so that a kill half way leaves no incomplete one behind."""
    hidden = path.with_name(PARTIAL + path.name)
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _remove_partial(directory: Path) -> None:
    for leftover in directory.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover)
