"""Which device a command computes on, and its memory given back."""

import gc

import torch

from kv4rl.config import require


def choose_device(name: str) -> torch.device:
    """The device called `name`: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".

    Raises ValueError for any other name, and for a CUDA device that this machine lacks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    expected = f"one of auto, {', '.join(there)} on this machine"
    if not count and str(name).startswith("cuda"):
        expected = "cpu: this machine has no CUDA device that torch can use"
    require(name in ("auto", *there), "device", name, expected)
    return torch.device(("cuda" if count else "cpu") if name == "auto" else name)


def release_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more: torch's allocator would keep it for itself."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
