"""write_kv on the CPU emulator (cuda_emulator/): every byte is the reference's, also for vectors that saturate."""

import pytest
import torch
from cuda_emulator.harness import Emulated, kept, poisoned, same_contents, vectors

from kv4rl.attention import cuda_arguments as host
from kv4rl.attention.reference import norm_and_turn, prepare_query
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.config import KVConfig


def write_awkward_vectors(backend, awkward_vectors, precision, d, dtype):
    """By `backend` and by the reference into caches that must then hold the same."""
    kv = KVConfig(precision, sink_tokens=18, recent_tokens=4)
    ours, reference = (poisoned(kv, CacheShape(1, 2, 1, d, dtype), 2, 3) for _ in range(2))
    where = TokenSlots.for_chunk(torch.tensor([1, 0]), 2, 0, 24, kv)
    where.page_ids[22] = -1  # a padding row writes nothing
    k, v = (awkward_vectors(1, d, dtype, seed) for seed in (1, 2))
    backend.write(ours, 0, k, v, where)
    reference.write(0, k, v, where)
    same_contents(ours, reference)


@pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4", "kv4rl"])
@pytest.mark.parametrize(
    ("d", "each", "dtype"),
    [
        (64, 8, torch.float32),
        (128, 8, torch.bfloat16),
        (256, 8, torch.float16),
        (64, 16, torch.bfloat16),
        (128, 16, torch.float32),
        (256, 16, torch.float16),
    ],
)
def test_write_kv_stores_the_references_bits(emulated, monkeypatch, awkward_vectors, precision, d, each, dtype):
    monkeypatch.setattr(host, "WRITE_CHANNELS", each)
    write_awkward_vectors(emulated, awkward_vectors, precision, d, dtype)


@pytest.mark.parametrize(
    ("precision", "d", "each"),
    [("kv8", 64, 8), ("kv8", 128, 16), ("kv4", 64, 16), ("kv4rl", 128, 8), ("kv4rl", 256, 8), ("kv4", 256, 16)],
)
def test_a_decode_step_leaves_the_other_tokens_of_its_pages_alone(emulated, monkeypatch, precision, d, each):
    """It rewrites more than its tokens' own bytes (PAGE_EACH): yet every byte is the reference's."""
    monkeypatch.setattr(host, "WRITE_CHANNELS", each)
    write_decode_steps(emulated, precision, d, range(1, 19))


def write_decode_steps(backend, precision, d, steps):
    kv = KVConfig(precision, sink_tokens=2, recent_tokens=5)
    ours, reference = (poisoned(kv, CacheShape(1, 3, 3, d, torch.bfloat16), 6, 3) for _ in range(2))
    table, slots = torch.tensor([[3, 0], [2, 5], [4, 1]]), torch.tensor([2, 0, 1])
    for n in steps:
        batch = DecodeBatch(table, torch.tensor([n, n % 3 * 7, 33 - n if n > 1 else 0]), slots)
        where = TokenSlots.for_decode(batch, kv)
        assert host.write_defines(ours, where=where)["PAGE_EACH"]
        k, v = (vectors(3, 3, d, torch.bfloat16, 100 * n + i) for i in range(2))
        backend.write(ours, 0, k, v, where)
        reference.write(0, k, v, where)
    assert torch.equal(ours.main.storage, reference.main.storage)
    same_contents(ours, reference)


def prepare_awkward_queries(backend, d):
    cache = KVCache(KVConfig("kv4"), CacheShape(1, 6, 1, d, torch.bfloat16), num_pages=1, num_slots=1)
    qkv = vectors(5, 8, d, torch.bfloat16, 1)
    qkv[0], qkv[1], qkv[2], qkv[3, :, 7], qkv[4, :3, 7] = 0.0, 1e4 * qkv[1], 1e-6 * qkv[2], torch.inf, torch.nan
    q = qkv[:, 1:7]  # tokens lie apart
    rows = backend.write(cache, 0, None, None, None, q=q)
    wanted = prepare_query(q, 1)
    assert torch.equal(rows[..., :d].view(torch.int8).float(), wanted.codes.flatten(1, 2))
    tail = rows[..., d : d + 8].view(torch.float32)
    assert torch.equal(kept(tail[..., 0]), kept(wanted.scale.flatten(1, 2)))
    assert torch.equal(tail[..., 1], wanted.total.flatten(1, 2))


@pytest.mark.parametrize(("d", "each"), [(64, 8), (128, 8), (128, 16), (256, 16)])
def test_prepared_queries_are_the_references(emulated, monkeypatch, d, each):
    monkeypatch.setattr(host, "WRITE_CHANNELS", each)
    prepare_awkward_queries(emulated, d)


@pytest.mark.parametrize(
    ("precision", "d", "each", "dtype", "normed"),
    [
        ("kv4rl", 128, 8, torch.bfloat16, True),
        ("kv4rl", 128, 16, torch.bfloat16, True),
        ("kv8", 64, 8, torch.float16, True),
        ("kv4", 256, 16, torch.float32, False),
        ("bf16", 128, 8, torch.bfloat16, True),
        ("bf16", 64, 16, torch.float16, False),
    ],
)
def test_norm_and_rope_in_the_write_leave_the_same_bits(
    emulated, raw_step, monkeypatch, precision, d, each, dtype, normed
):
    monkeypatch.setattr(host, "WRITE_CHANNELS", each)
    kv = KVConfig(precision, sink_tokens=3, recent_tokens=7)
    raw, turned = (poisoned(kv, CacheShape(1, 6, 2, d, dtype), 2, 3) for _ in range(2))
    where = TokenSlots.for_chunk(torch.tensor([1, 0]), 2, 0, 18, kv)
    q, k, v, before = raw_step(18, (6, 2), d, dtype, normed=normed)
    prepared = emulated.write(raw, 0, k, v, where, q=q, before=before)
    q, k = norm_and_turn(q, before.q_weight, before), norm_and_turn(k, before.k_weight, before)
    wanted = emulated.write(turned, 0, k, v, where, q=q)
    written = d + 8 if precision != "bf16" else d * dtype.itemsize
    assert torch.equal(prepared[..., :written], wanted[..., :written])
    same_contents(raw, turned)


RUN = "hi = offset / 8, q = offset % 2;", "hi = offset % 2, q = offset / 8;"
MUTATIONS = {
    "INT8 scale not saturated": (
        "kv8", "__hmin_nan(__float2half_rn(magnitude), __ushort_as_half(kFp16Max))", "__float2half_rn(magnitude)"
    ),
    "INT4 scale and offset not saturated": (
        "kv4", "__hmax2_nan(__hmin2_nan(__floats2half2_rn(x, y), top), bottom)", "__floats2half2_rn(x, y)"
    ),
    "INT8 codes not clamped": ("kv8", "fminf(fmaxf(quotient, low), high)", "quotient"),
    "INT4 codes not clamped": ("kv4", "fminf(fmaxf(quotient, low), high)", "quotient"),
    "infinite elements not bounded, INT8": ("kv8", "if (magnitude > kExtreme) bring", "if (false) bring"),
    "infinite elements not bounded, INT4": ("kv4", "if (magnitude > kExtreme) {", "if (false) {"),
    "infinite range not bounded": ("kv4", "range = {within_extremes(range.low), within_extremes(range.high)};", ""),
    "quotient not rounded as IEEE's": ("kv4", "return fmaf(fmaf(-near, step, x), inverse, near);", "return near;"),
    "nibble order of K": (
        "kv4", "other | words[1] << 4 : words[0] | other << 4", "other << 4 | words[1] : words[0] << 4 | other"
    ),
    "nibble order of V": (
        "kv4", "codes.c[2 * i] + codes.c[2 * i + 1] * 16", "codes.c[2 * i] * 16 + codes.c[2 * i + 1]"
    ),
    "bytes of a value: wrong token": ("kv4", *RUN),
}  # fmt: skip
RUN_MUTATIONS = {
    "run of a value: wrong token": ("kv4", *RUN),
    "run of a value, INT4: wrong place": ("kv4", "shift = 4 * (2 * q + hi)", "shift = 4 * (q + 2 * hi)"),
    "run of a value, INT8: wrong token of a pair": ("kv8", "q ? 0x5240 : 0x3514", "q ? 0x3514 : 0x5240"),
    "run of a value, INT8: wrong half": ("kv8", "hi ? none : low", "hi ? low : none"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_write_is_caught(awkward_vectors, tmp_path, name):
    precision, *mutation = MUTATIONS[name]
    backend = Emulated(tmp_path, mutation, mutates="write_kv")
    with pytest.raises(AssertionError):
        write_awkward_vectors(backend, awkward_vectors, precision, 64, torch.float32)


@pytest.mark.parametrize("name", RUN_MUTATIONS)
def test_a_mutated_write_of_a_decode_step_is_caught(tmp_path, name):
    precision, *mutation = RUN_MUTATIONS[name]
    backend = Emulated(tmp_path, mutation, mutates="write_kv")
    with pytest.raises(AssertionError):
        write_decode_steps(backend, precision, 64, (1, 2, 10))


def test_a_mutated_query_scale_is_caught(tmp_path):
    """An infinite query has an infinite scale: the correction of its quotient would be NaN."""
    mutation = ("magnitude < INFINITY ? divided_by<127>(magnitude) : magnitude", "divided_by<127>(magnitude)")
    with pytest.raises(AssertionError):
        prepare_awkward_queries(Emulated(tmp_path, mutation), 64)
