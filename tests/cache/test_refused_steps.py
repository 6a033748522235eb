"""A decode step's write and decode in one call: what is wrong with either is refused before anything is written."""

import re

import pytest
import torch

from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.config import KVConfig

KV = KVConfig("kv4rl", 4, 8)


@pytest.fixture
def cache():
    shape = CacheShape(num_layers=1, query_heads=8, kv_heads=2, head_dim=64, dtype=torch.float32)
    return KVCache(KV, shape, num_pages=6, num_slots=3, backend="reference")


def batch():
    return DecodeBatch(torch.tensor([[0, 1], [2, -1]]), torch.tensor([20, 5]), torch.tensor([0, 1]))


def step():
    """q, k, v and where they go, for a decode step of `batch()`."""
    return torch.ones(2, 8, 64), torch.ones(2, 2, 64), torch.ones(2, 2, 64), TokenSlots.for_decode(batch(), KV)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, None, "q='NoneType': expected a strided tensor [N, 8, 64]"),
        (1, None, "k='NoneType': expected a strided tensor [N, 2, 64]"),
        (0, torch.zeros(2, 4, 64), "q.shape=(2, 4, 64): expected [N, 8, 64]"),
        (0, torch.zeros(1, 8, 64), "page_table.shape=(2, 2): expected (1, 2)"),
    ],
)
def test_a_refused_step_writes_nothing(cache, place, value, message):
    given = list(step())
    given[place] = value
    before = cache.main.storage.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.write_and_decode(0, *given, batch())
    assert torch.equal(cache.main.storage, before)


def test_norm_and_rope_are_refused_where_they_would_be_left_undone(cache):
    assert not cache.takes_raw
    with pytest.raises(ValueError, match=r"^before='object': expected None, and q and k after QK-norm and RoPE"):
        cache.write_and_decode(0, *step(), batch(), before=object())
