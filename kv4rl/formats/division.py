"""Division by a constant as IEEE rounds it, on every device."""

import torch


def divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """x / by [same shape and floating dtype as x], with the bits of the CPU on a GPU too.

    On CUDA, torch turns a division by a number into a product with its rounded reciprocal, often another float; a scale
    whose last bit differs moves the elements at a tie to the next code.
    """
    return x / x.new_full((), by)
