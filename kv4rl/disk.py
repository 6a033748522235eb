"""What cannot be written, by name: an OSError of a full disk or a lost permission does not say which file it met."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


class NotWritten(OSError):
    """A file could not be written; the message names it. Command lines end with that sentence and status 1."""


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise `NotWritten` for what keeps the block from writing `path`."""
    try:
        yield
    except NotWritten:
        raise
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in its own
        raise NotWritten(f"{path} could not be written ({error}); the same command goes on once it can be") from error
