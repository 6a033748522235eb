"""How long the device works on a step, without waiting for it (§B.3: "summed CUDA-event decode time")."""

from time import perf_counter

import torch


class DeviceClock:
    """Milliseconds between `start` and `stop` on a device: by CUDA events, or by the CPU's own clock.

    `elapsed_ms` may be asked once the work is known to be done (its result has been fetched).
    """

    def __init__(self, device: torch.device):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def elapsed_ms(self) -> float:
        if self._events is None:
            return (self._times[1] - self._times[0]) * 1e3
        return self._events[0].elapsed_time(self._events[1])

    def _mark(self, index: int) -> None:
        if self._events is None:
            self._times[index] = perf_counter()
        else:
            self._events[index].record()
