"""A cache whose configuration, pages or side buffer were replaced by ones that the others were not made for."""

import re

import pytest
import torch

from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cache.side_buffer import SideBuffer
from kv4rl.config import KVConfig

SHAPE = CacheShape(num_layers=2, query_heads=8, kv_heads=2, head_dim=64, dtype=torch.float32)


def side(precision):
    sizes = {"num_layers": 2, "num_slots": 3, "kv_heads": 2, "head_dim": 64}
    return SideBuffer(KVConfig(precision), **sizes, device="cpu")


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"kv": KVConfig("kv4rl", 4, 16)}, "sink_tokens + recent_tokens=20: expected the side buffer's 12 entries"),
        ({"side": side("kv4")}, "sink_tokens + recent_tokens=12: expected the side buffer's 0 entries"),
        ({"kv": KVConfig("kv8")}, "sink_tokens + recent_tokens=0: expected the side buffer's 12 entries"),
        ({"kv": KVConfig("kv8"), "side": side("kv8")}, "precision='kv8': expected the main cache's, kv4rl"),
    ],
)
def test_a_part_that_the_others_were_not_made_for_is_refused_before_it_is_read(replaced, message):
    """A wider window than the buffer has would be read beyond it, and give an answer."""
    cache = KVCache(KVConfig("kv4rl", 4, 8), SHAPE, num_pages=6, num_slots=3, backend="reference")
    for name, part in replaced.items():
        setattr(cache, name, part)
    batch = DecodeBatch(torch.tensor([[0]]), torch.tensor([5]), torch.tensor([0]))
    k, where = torch.zeros(1, 2, 64), TokenSlots(*(torch.zeros(1, dtype=torch.int64) for _ in range(5)))
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.decode(0, torch.zeros(1, 8, 64), batch)
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.write(0, k, k, where)
