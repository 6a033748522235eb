"""SIGTERM, which a job scheduler sends before it takes the machine back: finish the iteration, save, end."""

import signal
import sys
import threading


class StopRequest:
    """`asked` turns true when the process receives SIGTERM inside the `with` block (main thread only)."""

    def __init__(self):
        self.asked = False
        self._before = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *exc) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        print("SIGTERM: the iteration in progress is finished and saved first", file=sys.stderr, flush=True)
