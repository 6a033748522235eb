import pytest
import torch

from kv4rl.attention.backends import choose_backend
from kv4rl.attention.cuda import write_kv
from kv4rl.attention.reference import norm_and_turn, prepare_query
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.config import KVConfig

pytestmark = pytest.mark.gpu


def caches(kv: KVConfig, d: int, dtype: torch.dtype, names=("cuda", "reference")):
    """The reference runs on the CPU, where `tests/formats` holds its bits (on CUDA: `test_formats.py` here)."""
    shape = CacheShape(1, 8, 2, d, dtype)
    devices = {"cuda": "cuda", "reference": "cpu"}
    return [KVCache(kv, shape, num_pages=40, num_slots=3, device=devices[name], backend=name) for name in names]


def awkward_vectors(n: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """Zero, constant, tiny, huge and infinite vectors, a NaN, ties, then ordinary ones (as in tests/attention)."""
    x = torch.randn(n, 2, d, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    x[0], x[1], x[2], x[3], x[4] = 0.0, 2.5, 1e4 * x[2], 1e-6 * x[3], 100 + 1e-3 * x[4]
    x[5], x[6], x[7], x[8], x[9, :, 3] = 1e5 * x[5], 1e6 * x[6], 1e6, -1e9, 3e37
    x[10], x[11], x[12, :, 5], x[13, :, 6], x[14, :, 1] = torch.inf, -torch.inf, torch.inf, -torch.inf, torch.inf
    x[14, :, 7], x[15, :, 7], x[16], x[17] = -torch.inf, torch.nan, 3e38, 2e38 + 2e37 * x[17].clamp(-3, 3)
    step = torch.tensor(0.1).half().item()
    x[18] = step * (torch.arange(d, device="cuda") % 15 + 0.5)
    x[18, :, 0], x[18, :, 1] = 0.0, 15 * step
    return x.to(dtype)


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values, a NaN equal to any NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4", "kv4rl"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_written_bits_are_the_references(precision, d, dtype):
    kv = KVConfig(precision, sink_tokens=20, recent_tokens=30)  # the awkward ones are kept in the side buffer too
    ours, reference = caches(kv, d, dtype)
    table = torch.randperm(40)
    k, v = awkward_vectors(333, d, dtype), awkward_vectors(333, d, dtype)
    for cache in (ours, reference):
        where = TokenSlots.for_chunk(table.to(cache.device), 1, 0, 333, kv)
        cache.write(0, k.to(cache.device), v.to(cache.device), where)
    ours.main.storage = ours.main.storage.cpu()
    a, b = (cache.main.pages(0, torch.arange(40)) for cache in (ours, reference))
    for name in ("k_scale", "k_offset", "v_scale", "v_offset", "k", "v"):
        if getattr(a, name) is not None:
            assert same_numbers(getattr(a, name), getattr(b, name)), name
    if precision != "bf16":
        assert torch.equal(a.k_codes, b.k_codes)
        assert torch.equal(a.v_codes, b.v_codes)
    for mine, wanted in zip(ours.tensors[1:], reference.tensors[1:], strict=True):
        assert same_numbers(mine.cpu().float(), wanted.float())


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_decode_steps_bits_are_the_references_and_its_pages_other_tokens_stay(precision, d):
    kv = KVConfig(precision, sink_tokens=2, recent_tokens=5)
    ours, reference = caches(kv, d, torch.bfloat16)
    table, slots = torch.randperm(40)[:9].view(3, 3), torch.tensor([2, 0, 1])
    for n in range(1, 40):
        batch = DecodeBatch(table, torch.tensor([n, n % 3 * 7, 48 - n]), slots)
        k, v = torch.randn(2, 3, 2, d, generator=torch.Generator().manual_seed(n)).bfloat16()
        for cache in (ours, reference):
            moved = DecodeBatch(*(x.to(cache.device) for x in (batch.page_table, batch.context_tokens, batch.slots)))
            cache.write(0, k.to(cache.device), v.to(cache.device), TokenSlots.for_decode(moved, kv))
    for mine, wanted in zip(ours.tensors, reference.tensors, strict=True):
        assert torch.equal(mine.cpu(), wanted)


def test_padding_rows_write_nothing():
    kv = KVConfig("kv4rl")
    (cache,) = caches(kv, 128, torch.bfloat16, names=("cuda",))
    before = [tensor.clone() for tensor in cache.tensors]
    where = TokenSlots.for_chunk(torch.arange(2, device="cuda"), 0, 0, 20, kv)
    where.page_ids[:] = -1
    k, v = torch.randn(2, 20, 2, 128, device="cuda", dtype=torch.bfloat16).unbind()
    cache.write(0, k, v, where)
    for tensor, wanted in zip(cache.tensors, before, strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_prepared_queries_are_the_references(d):
    (cache,) = caches(KVConfig("kv4"), d, torch.bfloat16, names=("cuda",))
    q = torch.randn(50, 8, d, device="cuda", dtype=torch.bfloat16)
    q[0], q[1], q[2], q[3, :, 7], q[4, :3, 7] = 0.0, 1e4 * q[1], 1e-6 * q[2], torch.inf, torch.nan
    rows = write_kv(cache, 0, q, None, None, None).cpu()
    wanted = prepare_query(q.cpu(), 2)
    assert torch.equal(rows[..., :d].view(torch.int8).float(), wanted.codes.flatten(1, 2))
    tail = rows[..., d : d + 8].view(torch.float32)
    assert same_numbers(tail[..., 0], wanted.scale.flatten(1, 2))
    assert torch.equal(tail[..., 1], wanted.total.flatten(1, 2))


def test_one_launch_takes_strided_slices_of_a_fused_projection():
    kv = KVConfig("kv4rl")
    fused, apart = caches(kv, 128, torch.bfloat16, names=("cuda", "cuda"))
    qkv = torch.randn(30, 12 * 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in qkv.split((8 * 128, 2 * 128, 2 * 128), dim=1))
    where = TokenSlots.for_chunk(torch.arange(2, device="cuda"), 0, 0, 30, kv)
    prepared = write_kv(fused, 0, q, k, v, where)
    apart.write(0, k.contiguous(), v.contiguous(), where)
    assert torch.equal(fused.main.storage, apart.main.storage)
    again = write_kv(apart, 0, q.contiguous(), None, None, None)
    assert torch.equal(prepared[..., : 128 + 8], again[..., : 128 + 8])


@pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4rl"])
@pytest.mark.parametrize(("d", "normed"), [(64, False), (128, True), (256, True)])
def test_norm_and_rope_in_the_write_leave_the_same_bits(raw_step, precision, d, normed):
    raw, turned = caches(KVConfig(precision), d, torch.bfloat16, names=("cuda", "cuda"))
    q, k, v, before = raw_step(300, (8, 2), d, torch.bfloat16, normed=normed, device="cuda")
    where = TokenSlots.for_chunk(torch.arange(20, device="cuda"), 1, 0, 300, raw.kv)
    prepared = write_kv(raw, 0, q, k, v, where, before)
    q, k = norm_and_turn(q, before.q_weight, before), norm_and_turn(k, before.k_weight, before)
    wanted = write_kv(turned, 0, q, k, v, where)
    written = 2 * d if precision == "bf16" else d + 8
    assert torch.equal(prepared[..., :written], wanted[..., :written])
    for mine, wanted in zip(raw.tensors, turned.tensors, strict=True):
        assert torch.equal(mine, wanted)


def test_wrong_strides_are_named():
    (cache,) = caches(KVConfig("kv4"), 128, torch.bfloat16, names=("cuda",))
    q = torch.randn(4, 128, 8, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    with pytest.raises(ValueError, match=r"q\.stride"):
        cache.backend.decode(cache, 0, q, None)


def test_cuda_is_what_auto_chooses_on_hopper():
    assert choose_backend("auto", "cuda").name == "cuda"
