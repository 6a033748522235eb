"""What every command line shares: input that cannot be used ends it with one sentence and status 2, before any work."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kv4rl.config import InputError

UNUSABLE_INPUT = 2  # the exit status of argparse for a wrong flag
INTERRUPTED = 130  # 128 + SIGINT, as a shell has it


@contextmanager
def one_sentence(program: str, *, kinds: tuple = (InputError, OSError), status: int = UNUSABLE_INPUT) -> Iterator[None]:
    """End the program with the message of an error in the block, and without a traceback, if it is of `kinds`.

    By default those that a user causes while a command sets itself up: `InputError`, and an OSError such as a folder
    that may not be written or a hub that cannot be reached. Everything else is a bug of ours and passes through; so
    wrap the set-up, not the work.
    """
    try:
        yield
    except kinds as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(status) from error


@contextmanager
def interruptible(program: str, then: str = "") -> Iterator[None]:
    """End the program with one sentence on Ctrl-C: that it was interrupted, and what follows from it (`then`)."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"{program}: interrupted{then}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
