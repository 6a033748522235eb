"""Writes: every stored value is exactly its source, quantised, wherever, whenever and in whatever chunks it came."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.attention import reference
from kv4rl.attention.regions import regions, side_entry
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cache.page_allocator import PageAllocator
from kv4rl.config import KVConfig
from kv4rl.formats.affine import dequantize_affine, quantize_affine
from kv4rl.formats.hadamard import rotate
from kv4rl.formats.symmetric import dequantize_symmetric, quantize_symmetric

SHAPE = CacheShape(num_layers=2, query_heads=4, kv_heads=2, head_dim=64, dtype=torch.float32)
precisions = pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4", "kv4rl"])


def int4(x):
    return dequantize_affine(quantize_affine(x))


def int8(x):
    return dequantize_symmetric(quantize_symmetric(x))


def stored(precision, k, v):
    """What the main cache must decode to."""
    if precision == "bf16":
        return k.float(), v.float()
    decode = int8 if precision == "kv8" else int4
    return decode(rotate(k)), decode(v)


def vectors(n, seed=0, shape=SHAPE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, shape.kv_heads, shape.head_dim, generator=generator).to(shape.dtype)


def new_cache(kv, shape=SHAPE, pages=20):
    return KVCache(kv, shape, num_pages=pages, num_slots=3, backend="reference")


def read_main(cache, row, n, layer=1):
    return tuple(x.transpose(1, 2).flatten(0, 1)[:n] for x in cache.main.read(layer, row[: -(-n // 16)]))


def fill(cache, row, slot, k, v, cuts, layer=1):
    for start, stop in zip([0, *cuts], [*cuts, len(k)], strict=True):
        cache.write(layer, k[start:stop], v[start:stop], TokenSlots.for_chunk(row, slot, start, stop, cache.kv))


def assert_side_holds(cache, slot, k, v, n, layer=1):
    """The ring equals one written afresh from the source vectors of positions that are protected at context n."""
    s, w = cache.kv.sink_tokens, cache.kv.recent_tokens
    split = regions(n, s, w)
    kept = [*range(*split.sink), *range(*split.recent)]
    entries = [side_entry(p, s, w) for p in kept]
    side_k, side_v = (x[0].transpose(0, 1)[entries] for x in cache.side.read(layer, torch.tensor([slot])))
    assert torch.equal(side_k, int8(rotate(k[kept]))) and torch.equal(side_v, int8(v[kept]))


@precisions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_read_back_is_the_source_quantised(precision, dtype, head_dim):
    shape = CacheShape(2, 4, 2, head_dim, dtype)
    cache, row, (k, v) = new_cache(KVConfig(precision), shape), torch.tensor([7, 2, 19, 0]), vectors(61, 0, shape)
    fill(cache, row, 1, k, v, [])
    for found, expected in zip(read_main(cache, row, 61), stored(precision, k, v), strict=True):
        assert torch.equal(found, expected)


@settings(deadline=None, max_examples=40)
@given(
    precision=st.sampled_from(["bf16", "kv8", "kv4", "kv4rl"]),
    n=st.integers(1, 120),
    cuts=st.lists(st.integers(1, 119), max_size=6, unique=True),
    widths=st.tuples(st.integers(0, 20), st.integers(0, 30)),
)
def test_chunking_does_not_matter(precision, n, cuts, widths):
    cache, row, (k, v) = new_cache(KVConfig(precision, *widths)), torch.randperm(20), vectors(n)
    fill(cache, row, 2, k, v, sorted(cut for cut in cuts if cut < n))
    for found, expected in zip(read_main(cache, row, n), stored(precision, k, v), strict=True):
        assert torch.equal(found, expected)
    if precision == "kv4rl":
        assert_side_holds(cache, 2, k, v, n)


@pytest.mark.parametrize(("s", "w"), [(16, 24), (3, 5), (0, 7), (6, 0), (1, 1)])
def test_token_by_token_the_ring_equals_a_fresh_one_at_every_context(s, w):
    cache, table, (k, v) = new_cache(KVConfig("kv4rl", s, w)), torch.randperm(20)[:5][None], vectors(80)
    for n in range(1, 81):
        batch = DecodeBatch(table, torch.tensor([n]), torch.tensor([1]))
        cache.write(1, k[n - 1 : n], v[n - 1 : n], TokenSlots.for_decode(batch, cache.kv))
        assert_side_holds(cache, 1, k, v, n)
    for found, expected in zip(read_main(cache, table[0], 80), stored("kv4rl", k, v), strict=True):
        assert torch.equal(found, expected)


def test_a_ring_that_forgets_the_sink_is_noticed(monkeypatch):
    from kv4rl.cache import batch as batch_module

    monkeypatch.setattr(
        batch_module, "side_entries", lambda positions, first_recent, kv: positions % kv.protected_tokens
    )
    cache, (k, v) = new_cache(KVConfig("kv4rl", 3, 5)), vectors(20)
    for n in range(20):
        fill_one = TokenSlots.for_chunk(range(2), 0, n, n + 1, cache.kv)
        cache.write(1, k[n : n + 1], v[n : n + 1], fill_one)
    with pytest.raises(AssertionError):
        assert_side_holds(cache, 0, k, v, 20)


@precisions
def test_a_write_leaves_everything_else_alone(precision):
    cache, row, (k, v) = new_cache(KVConfig(precision, 2, 4)), torch.tensor([3, 4]), vectors(32)
    cache.main.storage.fill_(0xFF)
    fill(cache, row, 0, k, v, [])
    before = read_main(cache, row, 32)
    other = [x.clone() for x in (cache.main.storage[0], cache.main.storage[1, :3], cache.main.storage[1, 5:])]
    new_k, new_v = vectors(1, seed=9)
    cache.write(1, new_k, new_v, TokenSlots.for_chunk(row, 0, 20, 21, cache.kv))
    after = read_main(cache, row, 32)
    for found, old, new in zip(after, before, stored(precision, new_k, new_v), strict=True):
        assert torch.equal(found[20], new[0])
        assert torch.equal(torch.cat((found[:20], found[21:])), torch.cat((old[:20], old[21:])))
    for found, old in zip(
        (cache.main.storage[0], cache.main.storage[1, :3], cache.main.storage[1, 5:]), other, strict=True
    ):
        assert torch.equal(found, old)


@precisions
def test_rows_without_a_page_write_nothing(precision):
    cache, (k, v) = new_cache(KVConfig(precision, 2, 4)), vectors(4)
    state = lambda: [x.clone() for x in (cache.main.storage, cache.side.k_codes, cache.side.v_scale)]
    before = state()
    where = TokenSlots.for_chunk([5], 0, 0, 4, cache.kv)
    where.page_ids = torch.full((4,), -1)
    cache.write(1, k, v, where)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    where = TokenSlots.for_chunk([5], 0, 0, 4, cache.kv)
    where.page_ids[:3] = -1
    cache.write(1, k, v, where)
    assert torch.equal(read_main(cache, torch.tensor([5]), 4)[1][3], stored(precision, k, v)[1][3])
    assert (cache.main.read(1, torch.tensor([5]))[1][0, :, :3] == 0).all()


@precisions
def test_a_write_in_blocks_that_cut_pages_is_the_same_write(precision, monkeypatch):
    caches = [new_cache(KVConfig(precision, 3, 20)) for _ in range(2)]
    row, (k, v) = torch.randperm(20), vectors(90)
    fill(caches[0], row, 1, k, v, [])
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 7 * SHAPE.kv_heads * SHAPE.head_dim)
    fill(caches[1], row, 1, k, v, [])
    assert torch.equal(caches[0].main.storage, caches[1].main.storage)
    assert torch.equal(caches[0].side.v_codes, caches[1].side.v_codes)


def test_several_requests_in_one_write_and_none():
    kv = KVConfig("kv4rl", 2, 4)
    together, apart, (k, v) = new_cache(kv), new_cache(kv), vectors(30)
    parts = [TokenSlots.for_chunk([8, 1], 0, 0, 18, kv), TokenSlots.for_chunk([5], 2, 0, 12, kv)]
    together.write(1, k, v, TokenSlots.cat(parts))
    apart.write(1, k[:18], v[:18], parts[0])
    apart.write(1, k[18:], v[18:], parts[1])
    together.write(1, k[:0], v[:0], TokenSlots.for_chunk([5], 2, 12, 12, kv))
    assert torch.equal(together.main.storage, apart.main.storage)
    assert torch.equal(together.side.k_codes, apart.side.k_codes)


def test_only_the_last_recent_positions_of_a_chunk_get_a_ring_entry():
    where = TokenSlots.for_chunk(range(4), 0, 0, 20, KVConfig("kv4rl", 3, 5))
    assert where.side_entries.tolist() == [0, 1, 2] + [-1] * 12 + [3 + (p - 3) % 5 for p in range(15, 20)]
    for precision in ("bf16", "kv8", "kv4"):
        assert (TokenSlots.for_chunk(range(4), 0, 0, 20, KVConfig(precision)).side_entries == -1).all()


def test_padding_rows_of_a_decode_batch_write_nothing():
    batch = DecodeBatch(torch.tensor([[4, 9], [-1, -1]]), torch.tensor([17, 0]), torch.tensor([1, -1]))
    where = TokenSlots.for_decode(batch, KVConfig("kv4rl", 4, 8))
    assert where.page_ids.tolist() == [9, -1] and where.positions.tolist() == [16, 0]
    assert where.offsets.tolist() == [0, 0] and where.side_entries.tolist()[0] == 4 + 12 % 8


def test_a_page_that_two_requests_decode_into_is_named():
    kv = KVConfig("kv4")
    cache = KVCache(kv, CacheShape(1, 2, 1, 64, torch.float32), num_pages=4, num_slots=3)
    batch = DecodeBatch(torch.tensor([[3], [1], [3]]), torch.tensor([4, 4, 9]), torch.arange(3))
    k, v = torch.zeros(2, 3, 1, 64)
    with pytest.raises(ValueError, match=r"^page_ids=\[3\]"):
        cache.write(0, k, v, TokenSlots.for_decode(batch, kv))


def test_bytes_are_the_paper_format():
    for precision, bits in (("bf16", 16), ("kv8", 8.125), ("kv4", 4.25), ("kv4rl", 4.25)):
        shape = CacheShape(3, 16, 4, 128, torch.bfloat16)
        cache = KVCache(KVConfig(precision), shape, num_pages=5, num_slots=2)
        assert cache.bytes_per_page == 3 * 4 * 2 * 16 * 128 * bits / 8
        side = 2 * 3 * 4 * 144 * 2 * (128 + 2) if precision == "kv4rl" else 0
        assert cache.nbytes == 5 * cache.bytes_per_page + side


def test_pages_beyond_two_gigabytes_are_reached():
    """64-bit offsets: the pool's pages are never touched except the last, so it costs no memory."""
    cache = new_cache(KVConfig("kv4", 0, 0), CacheShape(1, 4, 2, 128, torch.float32))
    pages = 2**31 // (2 * cache.main.chunk_bytes) + 10
    cache.main.storage = torch.empty(1, pages, 2, cache.main.chunk_bytes, dtype=torch.uint8)
    cache.allocator = PageAllocator(pages)
    shape = cache.shape
    k, v = vectors(16, 0, shape)
    cache.write(0, k, v, TokenSlots.for_chunk([pages - 1], 0, 0, 16, cache.kv))
    found = cache.main.read(0, torch.tensor([pages - 1]))[0][0].transpose(0, 1)
    assert torch.equal(found, stored("kv4", k, v)[0])
    batch = DecodeBatch(torch.tensor([[pages - 1]]), torch.tensor([16]), torch.tensor([0]))
    assert cache.decode(0, torch.randn(1, 4, 128), batch).isfinite().all()


def test_a_batch_of_none_reaches_no_backend():
    """A launch over a grid of none is an error of CUDA's."""
    kv = KVConfig("kv4rl", 4, 8)
    cache = KVCache(kv, CacheShape(1, 4, 2, 64, torch.float32), num_pages=2, num_slots=1)
    cache.backend = None
    k, q = torch.zeros(0, 2, 64), torch.zeros(0, 4, 64)
    where = TokenSlots.for_chunk([1], 0, 0, 0, kv)
    none = DecodeBatch(torch.zeros(0, 1, dtype=torch.int64), *torch.zeros(2, 0, dtype=torch.int64))
    cache.write(0, k, k, where)
    out, lse = cache.decode(0, q, none, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4))
    assert cache.write_and_decode(0, q, k, k, where, none).shape == (0, 4, 64)
