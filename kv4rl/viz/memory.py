"""What a response costs in cache bytes, by length: the pages grow with it, the side buffer does not (§5.2)."""

import numpy as np
import plotly.graph_objects as go
import torch

from kv4rl.config import PAGE_TOKENS, PRECISIONS, KVConfig
from kv4rl.formats.packing import chunk_bytes
from kv4rl.viz.style import PRECISION_COLOURS, PRECISION_NAMES


def response_bytes(kv: KVConfig, tokens: np.ndarray, *, head_dim: int) -> np.ndarray:
    """Cache bytes of one response and KV head: whole pages for `tokens` positions, plus the side buffer's slot.

    An INT8 side entry is K and V codes and two FP16 scales: 2 * head_dim + 4 bytes.
    """
    pages = -(-tokens // PAGE_TOKENS)
    return pages * chunk_bytes(kv.precision, head_dim, torch.bfloat16) + kv.protected_tokens * (2 * head_dim + 4)


def bytes_per_position(*, head_dim: int, sink_tokens: int, recent_tokens: int) -> go.Figure:
    """Bytes per position against response length, one curve a precision, log-log."""
    tokens = np.unique(np.geomspace(32, 16384, 200).astype(int))
    figure = go.Figure()
    for precision in PRECISIONS:
        kv = KVConfig(precision, sink_tokens, recent_tokens)
        y = response_bytes(kv, tokens, head_dim=head_dim) / tokens
        line = {"color": PRECISION_COLOURS[precision], "width": 3}
        figure.add_scatter(x=tokens, y=y, name=PRECISION_NAMES[precision], line=line)
    ticks = [32, 128, 512, 2048, 8192]
    figure.update_xaxes(type="log", title_text="response length, tokens", tickvals=ticks)
    figure.update_yaxes(type="log", title_text="bytes per position and KV head", tickvals=[128, 256, 512, 1024])
    figure.update_layout(height=380, width=760)
    return figure
