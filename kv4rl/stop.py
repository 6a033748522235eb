"""Two ways to ask a run to end after the iteration in progress, saved: SIGTERM, and a file `stop` in its folder.

A job scheduler sends SIGTERM before it takes the machine back. Under torchrun the signal comes from its agent, which
kills the ranks 30 seconds later: less than an iteration of a large model. The file has no such limit. (The torchrun of
torch 2.13 raises its own with --shutdown-timeout SECONDS; ranks that a crash leaves behind wait as long, then.) A
Slurm script asks half an hour before its end:

    #SBATCH --signal=B:USR1@1800
    trap 'touch "$OUT/stop"' USR1
    srun torchrun ... -m kv4rl.train ... --output_dir "$OUT" &
    wait  # the signal ends this one
    wait
"""

import os
import signal
import sys
import threading
from pathlib import Path

FILE = "stop"
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set in the ranks that torchrun started


class StopRequest:
    """`asked` is true after a SIGTERM inside the `with` block (main thread only), and while `file` is there."""

    def __init__(self, file: Path | None = None):
        self._file, self._signalled = file, False
        self._before = None

    @property
    def asked(self) -> bool:
        return self._signalled or (self._file is not None and self._file.exists())

    def obeyed(self) -> None:
        """The run is being saved: the same command must go on, not stop again."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *exc) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _receive(self, number: int, frame: object) -> None:
        self._signalled = True
        hurry = "; torchrun kills it if that takes long: the file `stop` has no limit" if TORCHRUN in os.environ else ""
        print(f"SIGTERM: the iteration in progress is finished and saved first{hurry}", file=sys.stderr, flush=True)
