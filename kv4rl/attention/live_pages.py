"""The pages of all requests that a decode step really reads, as one ragged list, and sums over each request's share.

No request is padded to the longest: P live pages are gathered once, worked on as one batch of 16-token blocks, and
reduced back to B requests by segment.
"""

from typing import NamedTuple

import torch

from kv4rl.config import PAGE_TOKENS

TILE_PAGES = 4  # probabilities are rounded in tiles of 64 tokens, at absolute positions (notes to Eq. 5.1, §A.3)


class LivePages(NamedTuple):
    """P pages in order of request; a page shared by two requests appears once for each."""

    num_requests: int
    rows: torch.Tensor  # int64 [P], the request
    page_ids: torch.Tensor  # int64 [P], in the pool
    tiles: torch.Tensor  # int64 [P], absolute 64-token tile of the request, numbered over the batch
    num_tiles: int
    valid: torch.Tensor  # bool [P, 16], positions inside the region


def live_pages(page_table: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> LivePages:
    """Pages holding positions [start, stop) of each request: page_table int64 [B, max_pages], bounds int64 [B]."""
    num_requests, max_pages = page_table.shape
    device = page_table.device
    first = torch.arange(max_pages, device=device) * PAGE_TOKENS
    start, stop = start[:, None], stop[:, None]
    live = (first < stop) & (first + PAGE_TOKENS > start) & (start < stop)
    rows, index = live.nonzero(as_tuple=True)
    positions = index[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=device)
    max_tiles = -(-max_pages // TILE_PAGES)
    return LivePages(
        num_requests=num_requests,
        rows=rows,
        page_ids=page_table[rows, index],
        tiles=rows * max_tiles + index // TILE_PAGES,
        num_tiles=num_requests * max_tiles,
        valid=(positions >= start[rows]) & (positions < stop[rows]),
    )


def segment_sum(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """Sum of `values` [P, ...] by segment, int64 [P] -> [count, ...]; 0 for an empty segment."""
    return values.new_zeros((count, *values.shape[1:])).index_add_(0, segments, values)


def segment_max(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """Largest of `values` [P, ...] by segment, int64 [P] -> [count, ...]; -inf if empty, NaN if one is NaN."""
    index = segments.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    empty = values.new_full((count, *values.shape[1:]), -torch.inf)
    return empty.scatter_reduce_(0, index, values, "amax")
