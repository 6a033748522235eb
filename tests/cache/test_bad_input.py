"""Whatever does not fit is refused where it enters, naming the field, the value and what would be right."""

import re

import pytest
import torch

from kv4rl.cache import batch as cache_batch
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.config import KVConfig
from kv4rl.formats.packing import chunk_bytes

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
        ({"query_heads": "8"}, "query_heads='8': expected an integer >= 1"),
        ({"head_dim": 64.0}, "head_dim=64.0: expected an integer >= 1"),
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
        ({"num_pages": 2.5}, "num_pages=2.5: expected an integer >= 1"),
        ({"num_slots": 1.5}, "num_slots=1.5: expected an integer >= 1"),
        ({"device": "nope"}, "device='nope': expected a torch device, such as cpu or cuda"),
        ({"device": "cuda:99"}, "device='cuda:99': expected one of the"),
        ({"backend": "cudnn"}, "backend='cudnn': expected one of auto"),
    ],
)
def test_sizes_and_backend(change, message):
    with refused(message):
        KVCache(KV, CacheShape(**SHAPE), **{"num_pages": 6, "num_slots": 3} | change)


@pytest.mark.parametrize("pages", [10**12, 10**17, 10**30])
def test_pages_beyond_the_memory(pages):
    size = pages * 2 * 2 * chunk_bytes("kv4rl", 64, torch.float32)
    with refused(f"cache pages={pages}: expected fewer pages or more memory: they need {size} bytes"):
        KVCache(KV, CacheShape(**SHAPE), num_pages=pages, num_slots=3)


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
        (tokens().tolist(), tokens(), "k='list': expected a strided tensor [N, 2, 64]"),
        (tokens().to_sparse(), tokens(), "k='Tensor': expected a strided tensor [N, 2, 64]"),
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


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("field", ["page_ids", "offsets", "positions", "slots", "side_entries"])
def test_places_named_on_another_device(cache, field, trusted):
    """A kernel would be handed a pointer of the wrong memory."""
    where = TokenSlots.for_chunk([1], 0, 0, 3, KV)
    setattr(where, field, getattr(where, field).to("meta"))
    if trusted:
        where.trust()
    with refused(f"{field}.device='meta': expected the cache's, cpu"):
        cache.write(0, tokens(), tokens(), where)


@pytest.mark.parametrize("made_for", [KVConfig("kv4rl", 4, 9), KVConfig("kv4rl", 12, 0), KVConfig("kv4", 4, 8)])
def test_places_made_for_other_protected_widths(cache, made_for):
    """Their entries may all exist, and still be those of other positions."""
    widths = (made_for.sink_tokens, made_for.recent_tokens) if made_for.precision == "kv4rl" else (0, 0)
    message = f"side_entries for (sink, recent)={widths}: expected the cache's, (4, 8)"
    decoded = TokenSlots.for_decode(batch(contexts=(20, 5)), made_for)
    for where in (TokenSlots.for_chunk([1], 0, 0, 2, made_for), decoded):
        for case in (where, TokenSlots.cat([where])):
            with refused(message):
                cache.write(0, tokens(2), tokens(2), case)
    with refused("side_entries for (sink, recent)="):
        TokenSlots.cat([decoded, TokenSlots.for_chunk([1], 0, 0, 2, KVConfig("kv4rl", 3, 8))])


def test_places_that_do_not_state_their_widths_are_held_to_the_entries_alone(cache):
    stated = TokenSlots.for_chunk([1], 0, 0, 2, KV)
    silent = TokenSlots(stated.page_ids + 1, stated.offsets, stated.positions, stated.slots + 1, stated.side_entries)
    joined = TokenSlots.cat([silent, stated])
    cache.write(0, tokens(4), tokens(4), joined)
    assert joined.widths == (4, 8)


@pytest.mark.parametrize("field", ["page_ids", "offsets", "slots", "side_entries"])
def test_places_that_are_no_tensor(cache, field):
    where = TokenSlots.for_chunk([1], 0, 0, 3, KV)
    setattr(where, field, [1, 1, 1])
    with refused(f"{field}='list': expected a tensor of int64 (3,)"):
        cache.write(0, tokens(), tokens(), where)


def test_two_tokens_for_one_place(cache):
    """Which of them is kept would be chance."""
    where = TokenSlots.for_chunk([1], 0, 0, 3, KV)
    where.offsets[2] = 1
    with refused("page_ids * 16 + offsets=[17]: expected a place of its own for each token"):
        cache.write(0, tokens(), tokens(), where)
    where = TokenSlots.for_chunk([1], 1, 0, 3, KV)
    where.side_entries[2] = 0
    with refused("slots * 12 + side_entries=[12]: expected an entry of its own for each token"):
        cache.write(0, tokens(), tokens(), where)


def spoilt_page(one):
    one.page_table[0, 1] = 10**9


def spoilt_context(one):
    one.context_tokens[0] = 500


def spoilt_slot(one):
    one.slots = torch.tensor([0, 3])


CHANGES = [
    (spoilt_page, "page_table=1000000000: expected 0 … 5"),
    (spoilt_context, "context_tokens=500: expected 0 … 32"),
    (spoilt_slot, "slots=3: expected 0 … 2"),
]


@pytest.mark.parametrize(("spoil", "message"), CHANGES)
def test_indices_that_change_after_they_were_checked(cache, spoil, message):
    """A page id written in place was an address that no one had looked at."""
    one = batch()
    cache.decode(0, torch.zeros(2, 8, 64), one)
    spoil(one)
    with refused(message):
        cache.decode(1, torch.zeros(2, 8, 64), one)


@pytest.mark.parametrize(("spoil", "message"), CHANGES)
def test_the_debug_switch_looks_at_trusted_values_in_every_call(cache, spoil, message, monkeypatch):
    monkeypatch.setattr(cache_batch, "CHECK_EVERY_CALL", True)
    with torch.inference_mode():  # whose tensors count no writes
        one = batch()
        one.trust()
        cache.decode(0, torch.zeros(2, 8, 64), one)
        spoil(one)
        with refused(message):
            cache.decode(1, torch.zeros(2, 8, 64), one)


def test_what_is_trusted_is_looked_at_once_for_its_kind(cache, monkeypatch):
    """Every layer of a step checks the same object."""
    where, one = TokenSlots.for_chunk([1], 0, 0, 3, KV), batch()
    looked = []
    for each in (where, one):
        each.trust()
        kinds = each._check_kinds
        monkeypatch.setattr(each, "_check_kinds", lambda *given, kinds=kinds: looked.append(given) or kinds(*given))
    for layer in range(2):
        cache.write(layer, tokens(), tokens(), where)
        cache.decode(layer, torch.zeros(2, 8, 64), one)
    assert len(looked) == 2


def test_chunks_that_the_page_table_row_cannot_hold():
    with refused("stop=33: expected at most 2 pages x 16 tokens"):
        TokenSlots.for_chunk([3, 4], 0, 0, 33, KV)
    with refused("start, stop=(5, 4): expected 0 <= start <= stop"):
        TokenSlots.for_chunk([3, 4], 0, 5, 4, KV)
    with refused("parts=[]: expected at least one TokenSlots"):
        TokenSlots.cat([])


@pytest.mark.parametrize("layer", [-1, 2, 0.0, None, "0", True])
def test_layers(cache, layer):
    with refused(f"layer={layer!r}: expected 0 … 1"):
        cache.write(layer, tokens(), tokens(), TokenSlots.for_chunk([1], 0, 0, 3, KV))
    with refused(f"layer={layer!r}: expected 0 … 1"):
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


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("field", ["page_table", "context_tokens", "slots"])
def test_batches_on_another_device(cache, field, trusted):
    given = batch()
    setattr(given, field, getattr(given, field).to("meta"))
    if trusted:
        given.trust()
    with refused(f"{field}.device='meta': expected the cache's, cpu"):
        cache.decode(0, torch.zeros(2, 8, 64), given)


def test_page_tables_with_apart_pages(cache):
    given = batch()
    given.page_table = given.page_table.T.contiguous().T
    with refused("page_table.stride=(1, 2): expected a dense last dimension"):
        cache.decode(0, torch.zeros(2, 8, 64), given)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3, 64, 2).transpose(1, 2),
        torch.zeros(2, 3, 64).transpose(0, 1),
        torch.zeros(3, 2, 128)[:, :, ::2],
    ],
)
def test_vectors_that_kernels_cannot_read_in_one_run(cache, x):
    with refused(f"v.stride={x.stride()}: expected heads and channels dense"):
        cache.write(0, tokens(), x, TokenSlots.for_chunk([1], 0, 0, 3, KV))


def test_vectors_that_begin_between_sixteen_bytes(cache):
    x = torch.zeros(3 * 2 * 64 + 1)[1:].view(3, 2, 64)
    with refused(f"v.data_ptr()={x.data_ptr()}: expected a multiple of 16"):
        cache.write(0, tokens(), x, TokenSlots.for_chunk([1], 0, 0, 3, KV))


def test_tokens_may_lie_apart(cache):
    """Slices of one fused projection, and one head in any order, are dense."""
    k, v = torch.zeros(3, 12, 64)[:, 8:].split(2, dim=1)
    cache.write(0, k, v, TokenSlots.for_chunk([1], 0, 0, 3, KV))
    single = KVCache(KV, CacheShape(**SHAPE | {"kv_heads": 1}), num_pages=2, num_slots=1, backend="reference")
    x = torch.zeros(1, 3, 64).transpose(0, 1)
    single.write(0, x, x, TokenSlots.for_chunk([1], 0, 0, 3, KV))


def test_another_device_of_the_same_type(cache):
    cache.device = torch.device("meta:0")
    x = torch.zeros(2, 8, 64, device="meta:1")
    with refused(f"q.device='{x.device}': expected the cache's, meta:0"):
        cache.check_heads("q", x, 8)


@pytest.mark.parametrize("where", [None, (1, 2), 5, "batch"])
def test_places_of_another_kind(cache, where):
    where = batch() if where == "batch" else where
    with refused(f"where={type(where).__name__!r}: expected a TokenSlots"):
        cache.write(0, tokens(2), tokens(2), where)


@pytest.mark.parametrize("given", [None, "where"])
def test_batches_of_another_kind(cache, given):
    given = TokenSlots.for_chunk([1], 0, 0, 2, KV) if given == "where" else given
    with refused(f"batch={type(given).__name__!r}: expected a DecodeBatch"):
        cache.decode(0, torch.zeros(2, 8, 64), given)


@pytest.mark.parametrize(("change", "message"), [({"kv": "kv4"}, "kv='str'"), ({"shape": None}, "shape='NoneType'")])
def test_configurations_of_another_kind(change, message):
    with refused(message):
        KVCache(**{"kv": KV, "shape": CacheShape(**SHAPE), "num_pages": 6, "num_slots": 3} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 0.5}, "slot=0.5: expected an integer >= 0"),
        ({"slot": -1}, "slot=-1: expected an integer >= 0"),
        ({"start": 1.0}, "start=1.0: expected an integer >= 0"),
        ({"stop": 3.5}, "stop=3.5: expected an integer >= 0"),
    ],
)
def test_chunks_between_two_positions(change, message):
    with refused(message):
        TokenSlots.for_chunk(**{"page_table_row": [1], "slot": 0, "start": 0, "stop": 3, "kv": KV} | change)


@pytest.mark.parametrize("context", [33, 50, 10**9])
def test_the_newest_position_of_a_context_beyond_its_pages(context):
    """On a GPU the look-up of its page would be an assertion on the device, after which nothing runs any more."""
    with refused(f"context_tokens={context}: expected 0 … 32"):
        TokenSlots.for_decode(batch(contexts=(context, 5)), KV)


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
