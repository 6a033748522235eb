"""Which position is sink, main or recent: three disjoint ranges that cover [0, n) for every n (§5.2, §5.3).

The main region is read from the INT4 main cache, the other two from the INT8 side buffer. A position counted twice,
or not at all, is a wrong softmax; so these few lines are the only place that decides.
"""

from typing import NamedTuple

import torch

from kv4rl.config import require


class Regions(NamedTuple):
    """Half-open position ranges; `sink[1] == main[0]` and `main[1] == recent[0]` always."""

    sink: tuple[int, int]
    main: tuple[int, int]
    recent: tuple[int, int]


def regions(context_tokens: int, s: int, w: int) -> Regions:
    """Split positions [0, context_tokens) into sink (first s), recent (last w that are not sink) and main (the rest).

    Raises `ValueError` if any argument is negative.

    >>> regions(300, 16, 128)
    Regions(sink=(0, 16), main=(16, 172), recent=(172, 300))
    >>> regions(20, 16, 128)
    Regions(sink=(0, 16), main=(16, 16), recent=(16, 20))
    """
    for name, value in (("context_tokens", context_tokens), ("sink_tokens", s), ("recent_tokens", w)):
        require(value >= 0, name, value, "an integer >= 0")
    sink_end = min(s, context_tokens)
    recent_start = max(sink_end, context_tokens - w)
    return Regions((0, sink_end), (sink_end, recent_start), (recent_start, context_tokens))


def main_region(context_tokens: torch.Tensor, s: int, w: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`regions(...).main` for a whole batch: int64 [B] -> (start, stop), each int64 [B]."""
    start = context_tokens.clamp(max=s)
    return start, torch.maximum(start, context_tokens - w)


def side_entry(position: int, s: int, w: int) -> int:
    """Where the side buffer keeps `position`: p if p < s, else s + (p - s) mod w; -1 if it keeps none (w == 0).

    Because entries fill in order, the valid entries at context n are exactly the first min(n, s + w).
    """
    if position < s:
        return position
    return s + (position - s) % w if w > 0 else -1
