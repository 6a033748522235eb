"""The rows of one history in blocks that see about as many columns, with the masks of main cache and side buffer."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kv4rl.attention.live_pages import TILE_PAGES
from kv4rl.config import PAGE_TOKENS
from kv4rl.fidelity.protection import visible_mask

TILE = TILE_PAGES * PAGE_TOKENS  # P is rounded in tiles of so many absolute positions
BLOCK_ROWS = 128


class RowBlock(NamedTuple):
    """Rows, and the columns that any of them sees, up to a whole tile. Biases are 0 inside a region, else -inf."""

    rows: slice
    columns: int
    main_bias: Tensor  # [..., rows, columns]
    side_columns: Tensor | None  # int64 [side]: what any of the rows protects; None for nothing
    side_bias: Tensor | None  # [..., rows, side]


def row_blocks(contexts: Tensor, protected: Tensor | None) -> list[RowBlock]:
    """contexts int64 [R], ascending; protected bool [..., R, columns], visible positions only, or None."""
    blocks = []
    for first in range(0, len(contexts), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        columns = int(contexts[rows][-1])
        columns += -columns % TILE
        main = visible_mask(contexts[rows], columns)
        side_columns = side_bias = None
        if protected is not None:
            here = protected[..., rows, :columns]
            main = main & ~F.pad(here, (0, columns - here.shape[-1]))
            side_columns = here.flatten(0, -2).any(0).nonzero()[:, 0]
            side_bias = _bias(here[..., side_columns])
        blocks.append(RowBlock(rows, columns, _bias(main), side_columns, side_bias))
    return blocks


def padded(x: Tensor) -> Tensor:
    """x [kv_heads, columns, d] with zeros up to a whole tile; no row sees them."""
    return F.pad(x, (0, 0, 0, -x.shape[1] % TILE))


def _bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
