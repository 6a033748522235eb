"""A training process started from a notebook, and its metrics as it writes them."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kv4rl.metrics import read_metrics

POLL_S = 0.2


def start_training(words: Sequence[str], log: Path) -> subprocess.Popen:
    """`python -m kv4rl.train` with these words, on its own; what it says goes to the end of `log`."""
    with log.open("a") as out:
        return subprocess.Popen([sys.executable, "-m", "kv4rl.train", *words], stdout=out, stderr=subprocess.STDOUT)


def follow(process: subprocess.Popen, output_dir: Path) -> Iterator[list[dict]]:
    """Yield the updates of the run so far (`kv4rl.metrics`, line 0 left out), each time there are more.

    Ends when the process does, after its last line. Raises RuntimeError if it ended with an error.
    """
    seen = 0
    while True:
        ended = process.poll() is not None  # asked before the file, so that its last line is not missed
        lines = [line for line in read_metrics(output_dir) if line["update"] > 0]
        if len(lines) > seen:
            seen = len(lines)
            yield lines
        if ended:
            break
        time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(f"the training process ended with status {process.returncode}; its log says why")
