import dataclasses

import pytest
import torch

from kv4rl.attention import cuda_arguments as host
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.config import KVConfig


@pytest.fixture
def cache():
    shape = CacheShape(2, 8, 2, 128, torch.bfloat16)
    return KVCache(KVConfig("kv4rl"), shape, num_pages=6, num_slots=3)


def batch_of(rows: int, pages: int) -> DecodeBatch:
    table = torch.arange(rows * pages).view(rows, pages) % 6
    return DecodeBatch(table, torch.full((rows,), 16 * pages), torch.arange(rows))


def decode_call(cache, batch, **changed):
    q = torch.randn(len(batch.slots), 8, 128, dtype=torch.bfloat16)
    space = host.Workspace(cache, *batch.page_table.shape)
    given = {"prepared": host.prepared_queries(cache, q), "out": torch.empty_like(q), "lse": None} | changed
    return host.decode_arguments(
        cache, 1, batch, given["prepared"], given["out"], given["lse"],
        space.units, space.counters, space.partial, space.arrivals,
    )  # fmt: skip


def test_arguments_point_at_the_layer(cache):
    arguments = decode_call(cache, batch_of(2, 3))
    assert arguments.pages == cache.main.storage.data_ptr() + cache.main.storage[0].nbytes
    assert arguments.side_v_scale == cache.side.v_scale.data_ptr() + cache.side.v_scale[0].nbytes
    assert (arguments.group, arguments.sink, arguments.recent, arguments.lse) == (4, 16, 128, None)


def test_unprotected_precisions_have_no_regions():
    shape = CacheShape(1, 4, 1, 64, torch.float16)
    cache = KVCache(KVConfig("kv4"), shape, num_pages=2, num_slots=1)
    assert host.regions_of(cache) == (0, 0)
    batch = batch_of(1, 2)
    space = host.Workspace(cache, 1, 2)
    arguments = host.plan_arguments(cache, batch, space.units, space.counters, space.chunk_weight)
    assert (arguments.sink, arguments.recent, arguments.rows) == (0, 0, 1)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"out": torch.empty(2, 8, 64, dtype=torch.bfloat16)}, "out"),
        ({"out": torch.empty(8, 2, 128, dtype=torch.bfloat16).transpose(0, 1)}, "out"),
        ({"lse": torch.empty(2, 8, dtype=torch.float64)}, "lse"),
        ({"prepared": torch.empty(3, 8, 144, dtype=torch.uint8)}, "prepared"),
        ({"prepared": torch.empty(2, 8, 144, dtype=torch.int8)}, "prepared"),
    ],
)
def test_a_wrong_tensor_is_named(cache, changed, named):
    with pytest.raises(ValueError, match=f"^{named}="):
        decode_call(cache, batch_of(2, 3), **changed)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_heads_that_are_not_dense_are_named(cache, name):
    where = TokenSlots.for_chunk(torch.arange(6), 0, 0, 5, cache.kv)
    tensors = {n: torch.zeros(5, h, 128, dtype=torch.bfloat16) for n, h in (("q", 8), ("k", 2), ("v", 2))}
    tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    prepared = host.prepared_queries(cache, tensors["q"])
    with pytest.raises(ValueError, match=rf"^{name}\.stride="):
        host.write_arguments(cache, 0, tensors["q"], tensors["k"], tensors["v"], where, prepared)


def test_tokens_may_lie_apart(cache):
    """Slices of one fused projection are taken as they are."""
    qkv = torch.zeros(5, 12, 128, dtype=torch.bfloat16)
    q, k, v = qkv.split((8, 2, 2), dim=1)
    where = TokenSlots.for_chunk(torch.arange(6), 0, 0, 5, cache.kv)
    arguments = host.write_arguments(cache, 0, q, k, v, where, host.prepared_queries(cache, q))
    assert (arguments.q_stride, arguments.k_stride, arguments.v_stride) == (3072, 3072, 3072)  # bytes
    assert arguments.k == qkv.data_ptr() + 8 * 128 * 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"cos": torch.ones(5, 128, dtype=torch.bfloat16)}, "cosines"),
        ({"sin": torch.ones(5, 1, 128)}, "sines"),
        ({"k_weight": torch.ones(129, dtype=torch.bfloat16)[1:]}, r"k_weight\.data_ptr\(\)"),
        ({"q_weight": torch.ones(64, dtype=torch.bfloat16)}, "q_weight"),
    ],
)
def test_a_wrong_norm_or_table_is_named(cache, raw_step, changed, named):
    q, k, v, before = raw_step(5, (8, 2), 128, torch.bfloat16, normed=True)
    where = TokenSlots.for_chunk(torch.arange(6), 0, 0, 5, cache.kv)
    before = dataclasses.replace(before, **changed)
    with pytest.raises(ValueError, match=f"^{named}="):
        host.write_arguments(cache, 0, q, k, v, where, host.prepared_queries(cache, q), before)


def test_only_a_decode_steps_tokens_are_written_by_whole_runs(cache):
    batch = DecodeBatch(torch.arange(6).view(3, 2), torch.tensor([5, 0, 17]), torch.arange(3))
    decode, chunk = TokenSlots.for_decode(batch, cache.kv), TokenSlots.for_chunk(torch.arange(6), 0, 0, 5, cache.kv)
    for where, wanted in ((decode, True), (chunk, False), (TokenSlots.cat([decode, chunk]), False), (None, False)):
        assert bool(host.write_defines(cache, where=where)["PAGE_EACH"]) is wanted


def test_a_build_fixes_what_is_still_to_be_done(cache, raw_step):
    builds = [None, *(raw_step(1, (8, 2), 128, torch.bfloat16, normed=normed)[3] for normed in (False, True))]
    assert [host.write_defines(cache, before)["BEFORE"] for before in builds] == [0, 1, 2]


@pytest.mark.parametrize(("pages", "chunks"), [(1, 1), (192, 2), (100, 1), (400, 3), (100_000, host.MAX_CHUNKS)])
def test_workspace_holds_the_most_chunks(pages, chunks):
    assert host.most_chunks(pages, (16, 128), host.CHUNK_WEIGHTS[1]) == chunks


def test_fewer_requests_are_split_finer_and_a_full_batch_least():
    weights = [host.chunk_weight_of(rows, kv_heads=4) for rows in (1, 4, 16, 64, 1024)]
    assert weights == [16, 16, 48, 140, 192]


def test_workspace_says_what_fits(cache):
    space = host.Workspace(cache, 2, 3)
    assert space.fits(batch_of(2, 3))
    assert not space.fits(batch_of(3, 3))
    assert not space.fits(batch_of(2, 4))
