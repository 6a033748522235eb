import contextlib
import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

from kv4rl.attention import cuda
from kv4rl.attention import cuda_arguments as host
from kv4rl.cache.batch import protected_widths
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
    given = {"layer": 1, "prepared": host.prepared_queries(cache, q), "out": torch.empty_like(q), "lse": None} | changed
    return host.decode_arguments(
        cache, given["layer"], batch, given["prepared"], given["out"], given["lse"],
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
    assert protected_widths(cache.kv) == (0, 0)
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
        ({"prepared": torch.empty(2, 8, 128, dtype=torch.uint8)}, "prepared"),
        ({"prepared": torch.empty(2, 8, 272, dtype=torch.uint8)}, "prepared"),
        ({"prepared": torch.empty(2 * 8 * 144 + 8, dtype=torch.uint8)[8:].view(2, 8, 144)}, r"prepared\.data_ptr\(\)"),
        ({"out": torch.empty(2, 8, 128, dtype=torch.float64)}, r"out\.dtype"),
        ({"out": torch.empty(2, 8, 128, dtype=torch.int32)}, r"out\.dtype"),
        ({"out": torch.empty(2, 8, 128, dtype=torch.bfloat16, device="meta")}, "out"),
        ({"lse": torch.empty(2, 8, device="meta")}, "lse"),
        ({"prepared": torch.empty(2, 8, 144, dtype=torch.uint8, device="meta")}, "prepared"),
        ({"layer": -1}, "layer"),
        ({"layer": 2}, "layer"),
    ],
)
def test_a_wrong_tensor_is_named(cache, changed, named):
    with pytest.raises(ValueError, match=f"^{named}="):
        decode_call(cache, batch_of(2, 3), **changed)


def test_normalisers_in_the_memory_of_the_output_are_refused(cache):
    out = torch.empty(2, 8, 128)
    lse = out.view(-1)[:16].view(2, 8)
    with pytest.raises(ValueError, match=r"^lse=.in out's memory.: expected memory of its own"):
        decode_call(cache, batch_of(2, 3), out=out, lse=lse)


def write_call(cache, layer=0, **changed):
    shapes = {"q": (5, 8, 128), "k": (5, 2, 128), "v": (5, 2, 128)}
    given = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in shapes.items()}
    given["prepared"] = host.prepared_queries(cache, given["q"])
    given["where"] = TokenSlots.for_chunk(torch.arange(6), 0, 0, 5, cache.kv)
    return host.write_arguments(cache, layer, **given | changed)


def heads(tokens, heads, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(tokens, heads, 128, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": heads(5, 8, torch.float32)}, "q.dtype=torch.float32: expected the model's, torch.bfloat16"),
        ({"q": heads(5, 4)}, "q.shape=(5, 4, 128): expected [N, 8, 128]"),
        ({"q": heads(4, 8)}, "q.shape=(4, 8, 128): expected as many tokens as k has, 5"),
        ({"k": None}, "given='q, v': expected q, or k and v, or all three"),
        ({"v": None}, "given='q, k': expected q, or k and v, or all three"),
        ({"q": None, "k": None, "v": None}, "given=None: expected q, or k and v, or all three"),
        ({"v": heads(4, 2)}, "v.shape=(4, 2, 128): expected k's, (5, 2, 128)"),
        ({"k": heads(4, 2), "v": heads(4, 2)}, "page_ids.shape=(5,): expected (4,)"),
        ({"v": heads(5, 2, device="meta")}, "v.device='meta': expected the cache's, cpu"),
        ({"where": None}, "where=None: expected the TokenSlots of k and v"),
        ({"prepared": torch.empty(5, 8, 128, dtype=torch.uint8)}, "prepared='torch.uint8 (5, 8, 128)"),
        ({"layer": -1}, "layer=-1: expected 0 … 1"),
        ({"layer": 7}, "layer=7: expected 0 … 1"),
    ],
)
def test_what_cannot_be_written_is_named(cache, changed, message):
    assert write_call(cache).tokens == 5
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        write_call(cache, **changed)


def test_places_that_do_not_exist_are_named(cache):
    where = TokenSlots.for_chunk(torch.arange(6), 0, 0, 5, cache.kv)
    where.page_ids[2] = 6
    with pytest.raises(ValueError, match=r"^page_ids=6: expected -1 … 5"):
        write_call(cache, where=where)


def test_as_many_queries_as_keys(cache):
    q = heads(4, 8)
    with pytest.raises(ValueError, match=r"^q\.shape=\(4, 8, 128\): expected as many tokens as k has, 5"):
        write_call(cache, q=q, prepared=host.prepared_queries(cache, q))


def test_elements_may_be_written_without_a_tail_and_not_decoded():
    """What `turn_and_write` gives to another decode."""
    cache = KVCache(KVConfig("bf16"), CacheShape(2, 8, 2, 128, torch.bfloat16), num_pages=6, num_slots=3)
    bare = torch.empty(5, 8, 256, dtype=torch.uint8)
    assert write_call(cache, prepared=bare).query_row == 256
    with pytest.raises(ValueError, match=r"^prepared='torch\.uint8"):
        decode_call(cache, batch_of(2, 3), prepared=bare[:2])


@pytest.fixture
def plan(cache, monkeypatch):
    """A plan of at most 2 requests of 3 pages, whose launches do nothing."""
    monkeypatch.setattr(cuda, "decode_kernel", lambda *_: cuda.Kernel(None, "decode_int4", 0, 1))
    monkeypatch.setattr(cuda, "_launch", lambda *_: None)
    monkeypatch.setattr(cuda.jit, "build", lambda name: SimpleNamespace(launch_plan=None))
    return cuda.DecodePlan(cache, 2, 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_table": torch.tensor([[0, 1, 2], [3, 99, 5]])}, "page_table=99: expected 0 … 5"),
        ({"page_table": torch.zeros(2, 3, dtype=torch.int32)}, "page_table.dtype=torch.int32: expected torch.int64"),
        ({"page_table": torch.zeros(2, 4, dtype=torch.int64)}, "page_table.shape=(2, 4): expected at most (2, 3)"),
        ({"page_table": torch.zeros(3, dtype=torch.int64)}, "page_table.shape=(3,): expected [B, max_pages]"),
        ({"context_tokens": torch.tensor([500, 1])}, "context_tokens=500: expected 0 … 48"),
        ({"slots": torch.tensor([0, 77])}, "slots=77: expected 0 … 2"),
        ({"slots": torch.zeros(2, dtype=torch.int64, device="meta")}, "slots.device='meta': expected the cache's, cpu"),
    ],
)
def test_what_cannot_be_planned_is_named(plan, changed, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        plan.plan(dataclasses.replace(batch_of(2, 3), **changed))


def test_a_trusted_batch_is_planned_without_a_look_at_its_values(plan):
    batch = dataclasses.replace(batch_of(2, 3), slots=torch.tensor([0, 77]))
    batch.trust()
    plan.plan(batch)


def test_running_before_planning_is_refused(cache, plan):
    out = torch.empty(2, 8, 128, dtype=torch.bfloat16)
    prepared = host.prepared_queries(cache, out)
    with pytest.raises(ValueError, match=r"^planned batch=None: expected plan\(batch\) before run"):
        plan.run(0, prepared, out)
    plan.plan(batch_of(2, 3))
    plan.run(0, prepared, out)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 3), "max_rows=0: expected an integer >= 1"),
        (("2", 3), "max_rows='2': expected an integer >= 1"),
        ((2, -3), "max_pages=-3: expected an integer >= 0"),
        ((2, 3, 0), "chunk_weight=0: expected an integer >= 1"),
        ((2, 3, 2.5), "chunk_weight=2.5: expected an integer >= 1"),
    ],
)
def test_sizes_that_no_plan_can_have(cache, sizes, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        cuda.DecodePlan(cache, *sizes)


def test_an_output_that_is_no_tensor_is_refused(cache):
    with pytest.raises(ValueError, match=r"^out='NoneType': expected a tensor \(2, 8, 128\)"):
        decode_call(cache, batch_of(2, 3), out=None)


def test_pages_of_fp32_elements_have_no_plan():
    cache = KVCache(KVConfig("bf16"), CacheShape(1, 8, 2, 128, torch.float32), num_pages=6, num_slots=3)
    with pytest.raises(ValueError, match=r"^dtype of bf16 pages=torch\.float32: expected 16-bit elements"):
        cuda.DecodePlan(cache, 2, 3)


@pytest.fixture
def devices(monkeypatch):
    """Indices of the devices that were made current, instead of doing so; a device's stream is 100 + its index."""
    entered = []

    @contextlib.contextmanager
    def enter(index):
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=100 + index))
    return entered


def test_launches_go_to_the_stream_of_the_caches_device(devices):
    launched = []
    cuda._launch("plan", lambda *given: launched.append(given) or 0, torch.device("cuda:1"), "arguments")
    ((arguments, stream),) = launched
    assert (devices, arguments, stream.value) == ([1], "arguments", 101)
    with pytest.raises(RuntimeError, match="plan: CUDA error 400"):
        cuda._launch("plan", lambda stream: 400, torch.device("cuda:0"))


def test_a_kernel_is_described_on_each_device(devices, monkeypatch):
    """Its grid is the device's multiprocessors, and each device allows it its shared memory."""

    def describe(group, entries, shared, grid):
        grid._obj.value = 10 + devices[-1]
        return 0

    library = SimpleNamespace(describe_decode_int4=describe, launch_decode_int4=None)
    monkeypatch.setattr(cuda.jit, "build", lambda name, **defines: library)
    cuda.decode_kernel.cache_clear()
    kernel = lambda index: cuda.decode_kernel("kv4", 128, 4, torch.bfloat16, 0, torch.device("cuda", index))
    assert [kernel(index).blocks for index in (0, 1, 0)] == [10, 11, 10] and devices == [0, 1]
    cuda.decode_kernel.cache_clear()


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
