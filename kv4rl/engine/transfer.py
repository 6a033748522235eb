"""Copies between host and device that let the host go on at once, whatever the device still has to do before them."""

import numpy as np
import torch

from kv4rl.model.communicator import Communicator


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` on `device`; through pinned memory, which torch keeps until the copy is done. On a CPU: the array."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """The values of a tensor as they are when the device gets here; `wait` returns them."""

    def __init__(self, source: torch.Tensor):
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._host.copy_(source, non_blocking=True)
        self._done = None
        if source.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self, communicator: Communicator | None = None) -> np.ndarray:
        """`communicator`: of the ranks that the source was computed with."""
        if self._done is not None:
            wait_for(self._done, communicator)
        return self._host.numpy()


def wait_for(event: torch.cuda.Event, communicator: Communicator | None) -> None:
    """Let the host wait for the device; with peers not for ever (`Communicator.wait`)."""
    if communicator is None:
        event.synchronize()
    else:
        communicator.wait(event)
