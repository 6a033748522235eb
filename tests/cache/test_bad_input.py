"""Whatever does not fit is refused where it enters, naming the field, the value and what would be right."""

import re

import pytest
import torch

from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.config import KVConfig

SHAPE = {"num_layers": 2, "query_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": torch.float32}
KV = KVConfig("kv4rl", 4, 8)


@pytest.fixture
def cache():
    return KVCache(KV, CacheShape(**SHAPE), num_pages=6, num_slots=3, backend="reference")


def refused(message):
    return pytest.raises(ValueError, match=re.escape(message))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head_dim=96: expected one of 64, 128, 256"),
        ({"query_heads": 9}, "query_heads, kv_heads=(9, 2): expected a multiple of kv_heads"),
        ({"query_heads": 34}, "query heads per KV head=17: expected 1 … 16"),
        ({"kv_heads": 0}, "kv_heads=0: expected an integer >= 1"),
        ({"num_layers": 0}, "num_layers=0: expected an integer >= 1"),
        ({"dtype": torch.float64}, "dtype=torch.float64: expected bfloat16, float16 or float32"),
    ],
)
def test_shapes_that_no_kernel_serves(change, message):
    with refused(message):
        CacheShape(**SHAPE | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 0}, "num_pages=0: expected an integer >= 1"),
        ({"num_slots": 0}, "num_slots=0: expected an integer >= 1"),
        ({"backend": "cudnn"}, "backend='cudnn': expected one of auto"),
    ],
)
def test_sizes_and_backend(change, message):
    with refused(message):
        KVCache(KV, CacheShape(**SHAPE), **{"num_pages": 6, "num_slots": 3} | change)


@pytest.mark.parametrize("change", [{"sink_tokens": -1}, {"recent_tokens": -1}, {"precision": "int4"}])
def test_configurations(change):
    with refused(f"{next(iter(change))}={next(iter(change.values()))!r}: expected"):
        KVConfig(**change)


@pytest.mark.parametrize("precision", ["bf16", "kv8"])
def test_eight_bit_probabilities_belong_to_int4(precision):
    with refused(f"probability_operand='u8': expected fp16 for precision {precision}"):
        KVCache(KVConfig(precision, probability_operand="u8"), CacheShape(**SHAPE), num_pages=1, num_slots=1)


def tokens(n=3, heads=2, d=64, dtype=torch.float32):
    return torch.zeros(n, heads, d, dtype=dtype)


@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        (tokens(heads=8), tokens(heads=8), "k.shape=(3, 8, 64): expected [N, 2, 64]"),
        (tokens(d=128), tokens(), "k.shape=(3, 2, 128): expected [N, 2, 64]"),
        (tokens(), tokens(n=4), "v.shape=(4, 2, 64): expected k's, (3, 2, 64)"),
        (tokens(), tokens(dtype=torch.bfloat16), "v.dtype=torch.bfloat16: expected the model's, torch.float32"),
        (tokens(n=4), tokens(n=4), "page_ids.shape=(3,): expected (4,)"),
        (tokens()[0], tokens()[0], "k.shape=(2, 64): expected [N, 2, 64]"),
        (tokens().to("meta"), tokens(), "k.device='meta': expected the cache's, cpu"),
    ],
)
def test_vectors_to_write(cache, k, v, message):
    with refused(message):
        cache.write(0, k, v, TokenSlots.for_chunk([1], 0, 0, 3, KV))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_ids", [6, 0, 0], "page_ids=6: expected -1 … 5"),
        ("page_ids", [-2, 0, 0], "page_ids=-2: expected -1 … 5"),
        ("offsets", [0, 16, 0], "offsets=16: expected 0 … 15"),
        ("slots", [0, 3, 0], "slots=3: expected 0 … 2"),
        ("side_entries", [0, 1, 12], "side_entries=12: expected -1 … 11"),
    ],
)
def test_places_that_do_not_exist(cache, field, value, message):
    where = TokenSlots.for_chunk([1], 0, 0, 3, KV)
    setattr(where, field, torch.tensor(value))
    with refused(message):
        cache.write(0, tokens(), tokens(), where)
    setattr(where, field, torch.tensor(value, dtype=torch.int32))
    with refused(f"{field}.dtype=torch.int32: expected torch.int64"):
        cache.write(0, tokens(), tokens(), where)


def test_chunks_that_the_page_table_row_cannot_hold():
    with refused("stop=33: expected at most 2 pages x 16 tokens"):
        TokenSlots.for_chunk([3, 4], 0, 0, 33, KV)
    with refused("start, stop=(5, 4): expected 0 <= start <= stop"):
        TokenSlots.for_chunk([3, 4], 0, 5, 4, KV)
    with refused("parts=[]: expected at least one TokenSlots"):
        TokenSlots.cat([])


@pytest.mark.parametrize("layer", [-1, 2])
def test_layers(cache, layer):
    with refused(f"layer={layer}: expected 0 … 1"):
        cache.write(layer, tokens(), tokens(), TokenSlots.for_chunk([1], 0, 0, 3, KV))
    with refused(f"layer={layer}: expected 0 … 1"):
        cache.decode(layer, torch.zeros(1, 8, 64), batch())


def batch(table=((0, 1), (2, -1)), contexts=(20, 5), slots=(0, 1)):
    return DecodeBatch(*(torch.tensor(x) for x in (table, contexts, slots)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": ((0, 6), (2, -1))}, "page_table=6: expected 0 … 5"),
        ({"table": ((0, -1), (2, -1))}, "page_table=-1: expected 0 … 5"),
        ({"contexts": (33, 5)}, "context_tokens=33: expected 0 … 32"),
        ({"contexts": (-1, 5)}, "context_tokens=-1: expected 0 … 32"),
        ({"contexts": (5,)}, "context_tokens.shape=(1,): expected (2,)"),
        ({"contexts": (5.0, 5.0)}, "context_tokens.dtype=torch.float32: expected torch.int64"),
        ({"slots": (0, 3)}, "slots=3: expected 0 … 2"),
        ({"slots": (-1, 0)}, "slots=-1: expected 0 … 2"),
        ({"table": (0, 1)}, "page_table.shape=(2,): expected [B, max_pages]"),
    ],
)
def test_batches_to_decode(cache, change, message):
    with refused(message):
        cache.decode(0, torch.zeros(2, 8, 64), batch(**change))


def test_queries(cache):
    with refused("q.shape=(2, 4, 64): expected [N, 8, 64]"):
        cache.decode(0, torch.zeros(2, 4, 64), batch())
    with refused("q.dtype=torch.bfloat16: expected the model's, torch.float32"):
        cache.decode(0, torch.zeros(2, 8, 64, dtype=torch.bfloat16), batch())


def test_pages_of_padding_rows_and_beyond_the_context_are_nobodys_business(cache):
    out = cache.decode(0, torch.zeros(2, 8, 64), batch(table=((0, 99), (-7, -1)), contexts=(16, 0), slots=(0, -5)))
    assert out.isfinite().all()


def test_a_refused_write_changes_nothing(cache):
    where = TokenSlots.for_chunk([1], 0, 0, 3, KV)
    where.offsets[2] = 99
    before = cache.main.storage.clone()
    with refused("offsets=99"):
        cache.write(0, tokens() + 1, tokens() + 1, where)
    assert torch.equal(cache.main.storage, before)
