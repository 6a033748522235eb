"""Which rank trains on which responses: equal numbers of microbatches everywhere, of nearly equal token counts."""

import heapq
from collections.abc import Sequence

from kv4rl.config import require


def balanced(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Indices into `lengths` as [ranks][microbatches][sequences]; every rank has the same number of microbatches.

    A sharded learner gathers weights in every microbatch, together: a rank with one fewer would leave the others
    waiting. Longest first into the emptiest microbatch, with as few microbatches as keep each within `max_tokens`
    input tokens (a longer sequence is one of its own). With fewer sequences than ranks some are empty. No sequence at
    all: no microbatch. Raises ValueError for ranks or max_tokens below 1.
    """
    require(ranks >= 1, "ranks", ranks, "an integer >= 1")
    require(max_tokens >= 1, "microbatch_tokens", max_tokens, "an integer >= 1")
    if not lengths:
        return [[] for _ in range(ranks)]
    limit = max(max_tokens, *lengths)
    count = -(-sum(lengths) // (ranks * limit))
    while (bins := _fill(lengths, ranks * count))[0][0] > limit:
        count += 1
    parts = [sorted(members) for _, members in bins]
    return [parts[rank::ranks] for rank in range(ranks)]


def _fill(lengths: Sequence[int], count: int) -> list[tuple[int, list[int]]]:
    """(tokens, indices) of `count` bins, fullest first, so that ranks dealt them in turn differ little."""
    bins = [(0, number, []) for number in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number, members = bins[0]
        heapq.heapreplace(bins, (load + lengths[index], number, [*members, index]))
    return [(load, members) for load, _, members in sorted(bins, key=lambda each: (-each[0], each[1]))]
