"""The BF16-protected arm of the replay: which positions it reads where, written token by token."""

import pytest
import torch

from kv4rl.attention.merge import merge_state
from kv4rl.bench.bf16_protected import Bf16Protected, merged
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.config import KVConfig

SHAPE = CacheShape(1, 4, 2, 64, torch.float32)
KV = KVConfig("kv4rl", sink_tokens=16, recent_tokens=24)
LENGTHS = (1, 15, 16, 17, 39, 40, 41, 57, 90)


def decoder_inputs(length: int):
    generator = torch.Generator().manual_seed(length)
    k, v = (torch.randn(length, 2, 64, generator=generator) for _ in range(2))
    return k, v, torch.randn(1, 4, 64, generator=generator)


def expected(length: int) -> torch.Tensor:
    """Attention over INT4 for the main region, with unquantised K and V at the protected positions."""
    k, v, q = decoder_inputs(length)
    cache = KVCache(KVConfig("kv4"), SHAPE, num_pages=6, num_slots=1)
    plain = KVCache(KVConfig("bf16"), SHAPE, num_pages=6, num_slots=1)
    protected = [p for p in range(length) if p < 16 or p >= length - 24]
    rest = [p for p in range(length) if p not in protected]
    parts = []
    for part, positions in ((cache, rest), (plain, protected)):
        count = len(positions)
        part.write(0, k[positions], v[positions], TokenSlots.for_chunk(range(6), 0, 0, count, part.kv))
        parts += part.decode(0, q, DecodeBatch(torch.arange(6)[None], torch.tensor([count]), torch.tensor([0])), True)
    return merge_state(*parts)[0]


@pytest.mark.parametrize("together", [False, True])
def test_every_length_reads_each_position_once_where_it_belongs(together):
    for length in LENGTHS:
        k, v, q = decoder_inputs(length)
        cache = KVCache(KVConfig("kv4"), SHAPE, num_pages=8, num_slots=3)
        cache.backend = Bf16Protected(cache, KV)
        slots, table = torch.tensor([2]), torch.tensor([[5, 1, 7, 0, 3, 2]])
        for position in range(length):
            batch = DecodeBatch(table, torch.tensor([position + 1]), slots)
            where = TokenSlots.for_decode(batch, cache.kv)
            token = (k[position : position + 1], v[position : position + 1])
            if together:
                out = cache.write_and_decode(0, q, *token, where, batch)
            else:
                cache.write(0, *token, where)
                out = cache.decode(0, q, batch)
        torch.testing.assert_close(out, expected(length), rtol=1e-5, atol=1e-5)


def test_merged_is_merge_state():
    generator = torch.Generator().manual_seed(0)
    o_a, o_b = torch.randn(2, 5, 3, 8, generator=generator)
    z_a, z_b = 4 * torch.randn(2, 5, 3, generator=generator)
    z_a[:2], z_b[1:3] = -torch.inf, -torch.inf
    for found, wanted in zip(merged(o_a, z_a, o_b, z_b), merge_state(o_a, z_a, o_b, z_b), strict=True):
        torch.testing.assert_close(found, wanted)


def test_what_it_cannot_read_is_refused():
    with pytest.raises(ValueError, match="precision='kv8': expected kv4"):
        Bf16Protected(KVCache(KVConfig("kv8"), SHAPE, num_pages=1, num_slots=1), KV)
    with pytest.raises(ValueError, match="sink_tokens=4: expected whole pages of 16"):
        Bf16Protected(KVCache(KVConfig("kv4"), SHAPE, num_pages=1, num_slots=1), KVConfig("kv4rl", 4, 8))
