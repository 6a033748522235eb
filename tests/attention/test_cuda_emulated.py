"""kernels/cuda on the CPU: the device sources themselves, compiled by a C++ compiler over a small emulator.

`cuda_emulator/` runs a block's threads as fibers and gives warps, mbarriers, bulk copies and tensor-core operations
their definition in the PTX manual. What it cannot show is timing, and races that fibers do not have.
"""

import ctypes
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from kv4rl.attention import cuda_arguments as host
from kv4rl.attention import jit
from kv4rl.attention.float64 import bf16_peer, oracle
from kv4rl.attention.reference import norm_and_turn, prepare_query
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import KVConfig

EMULATOR = Path(__file__).parent / "cuda_emulator"
REPLACED = ("mma", "arithmetic", "bulk_copy", "synchronise", "shared_memory", "launch_early")  # no words on a CPU
CHUNK_WEIGHT = 6  # pages: short requests split too
BLOCKS = 3
KERNELS = {"kv4": "decode_int4", "kv4rl": "decode_int4", "kv8": "decode_int8", "bf16": "decode_bf16"}
LAUNCHES = {
    "plan": "void run(PlanArguments const* a) { emulator::launch(plan_kernel, *a, {1}, kPlanThreads); }",
    "write_kv": "void run(WriteArguments const* a) { WriteLaunch const l = launch_of(*a); "
    "emulator::launch(write_kv_kernel, l, {unsigned(a->tokens), blocks_of_token(l)}, threads_of(l)); }",
    **{
        name: f"void run(DecodeArguments const* a, int blocks) "
        f"{{ emulator::launch({name}_kernel, *a, {{unsigned(blocks)}}, kThreads); }}"
        for name in KERNELS.values()
    },
}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def host_source(text: str) -> str:
    """The device part of a CUDA file as C++: without what launches it."""
    text = re.sub(r'extern "C" int \w+\(.*?\n}\n', "", text, flags=re.DOTALL)
    text = re.sub(r"// Dynamic shared memory and resident blocks.*?\n}\n", "", text, flags=re.DOTALL)
    text = text.replace("__shared__ alignas(16)", "alignas(16) __shared__")
    return text.replace("extern __shared__ uint8_t dynamic[];", "")


def compile_sources(directory: Path, name: str, defines: dict, mutation: tuple[str, str] | None = None) -> ctypes.CDLL:
    """Build `name`.cu over the emulator in `directory`, with one piece of text replaced if `mutation` says so."""
    found = False
    for path in jit.sources().glob("*.cu*"):
        text = host_source(path.read_text())
        if path.suffix == ".cuh" and path.stem in REPLACED:
            text = '#pragma once\n#include "emulated.h"\n'
        if mutation is not None and mutation[0] in text:
            found, text = True, text.replace(*mutation)
        (directory / path.name).write_text(text)
    if mutation is not None and not found:
        raise LookupError(f"{mutation} is no longer in the sources")
    driver = f'#include "{name}.cu"\nnamespace kv4rl {{ extern "C" {LAUNCHES[name]} }}\n'
    (directory / "driver.cpp").write_text(driver)
    library = directory / f"{name}.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
    includes = [f"-I{directory}", f"-I{EMULATOR}", f"-I{EMULATOR / 'include'}"]
    values = [f"-D{key}={int(value)}" for key, value in defines.items()]
    command = ["g++", *flags, *includes, *values, "-o", str(library), str(directory / "driver.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return ctypes.CDLL(str(library))


class Emulated:
    """`attention.backends.Backend` over the emulated kernels.

    `mutation` changes the sources of the decode kernel, `also` adds to its defines.
    """

    name = "emulated"

    def __init__(self, directory: Path, mutation: tuple[str, str] | None = None, sound=None, **also: int):
        self.directory, self.mutation, self.sound, self.also = directory, mutation, sound, also
        self.library = lru_cache(self._library)

    def _library(self, name: str, defines: tuple) -> ctypes.CDLL:
        if self.sound is not None and not name.startswith("decode"):
            return self.sound.library(name, defines)  # only decode is mutated
        place = self.directory / re.sub(r"\W+", "_", f"{name}_{defines}")
        place.mkdir(exist_ok=True)
        return compile_sources(place, name, dict(defines), self.mutation)

    def write(self, cache, layer, k, v, where, q=None, before=None):
        prepared = None if q is None else host.prepared_queries(cache, q)
        arguments = host.write_arguments(cache, layer, q, k, v, where, prepared, before)
        library = self.library("write_kv", tuple(host.write_defines(cache, before, where).items()))
        library.run(ctypes.byref(arguments))
        return prepared

    def decode(self, cache, layer, q, batch, return_lse=False):
        shape = cache.shape
        prepared = self.write(cache, layer, None, None, None, q=q)
        space = host.Workspace(cache, *batch.page_table.shape, chunk_weight=CHUNK_WEIGHT)
        plan = host.plan_arguments(cache, batch, space.units, space.counters, CHUNK_WEIGHT)
        self.library("plan", ()).run(ctypes.byref(plan))
        out, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
        arguments = host.decode_arguments(
            cache, layer, batch, prepared, out, lse, space.units, space.counters, space.partial, space.arrivals
        )
        defines = {"HEAD_DIM": shape.head_dim, "QUERY_TILES": 1 if shape.group <= 8 else 2, "WARPS": 2, "BLOCKS": 1}
        defines |= {"STAGES": 3, "TILES": 2 if shape.head_dim == 128 else 1}
        defines |= {"PROTECTED": cache.kv.precision == "kv4rl", "BF16": shape.dtype == torch.bfloat16}
        defines |= {"BYTES": cache.kv.probability_operand == "u8"} | self.also
        library = self.library(KERNELS[cache.kv.precision], tuple(defines.items()))
        library.run(ctypes.byref(arguments), BLOCKS)
        assert space.counters[1:].eq(0).all()  # the next layer starts afresh
        assert space.arrivals.eq(0).all()
        return (out, lse) if return_lse else out


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return Emulated(tmp_path_factory.mktemp("cuda"))


def poisoned(kv: KVConfig, shape: CacheShape, num_pages: int, num_slots: int) -> KVCache:
    cache = KVCache(kv, shape, num_pages=num_pages, num_slots=num_slots, backend="reference")
    cache.main.storage.fill_(255)
    cache.side.v_codes.fill_(127)
    cache.side.k_scale.fill_(torch.nan)
    cache.side.v_scale.fill_(torch.nan)
    return cache


def vectors(n: int, heads: int, d: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, heads, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(kv: KVConfig, lengths: list[int], *, d=128, group=4, kv_heads=1, dtype=torch.float32):
    """(cache, batch, q): requests on shuffled pages, written by the reference into a poisoned cache."""
    pages = [pages_for(n) for n in lengths]
    rows = len(lengths)
    cache = poisoned(kv, CacheShape(1, group * kv_heads, kv_heads, d, dtype), sum(pages) + 1, rows)
    order = torch.randperm(sum(pages) + 1, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((rows, max([*pages, 1])), -1)
    for row, n in enumerate(lengths):
        table[row, : pages[row]] = torch.tensor([order.pop() for _ in range(pages[row])])
        where = TokenSlots.for_chunk(table[row], row, 0, n, kv)
        if n:
            cache.write(0, vectors(n, kv_heads, d, dtype, 10 + row), vectors(n, kv_heads, d, dtype, 90 + row), where)
    batch = DecodeBatch(table, torch.tensor(lengths), torch.arange(rows))
    return cache, batch, vectors(rows, group * kv_heads, d, dtype, 5)


def check(backend, cache, batch, q):
    """No further from float64 than 1.5 times BF16 attention on the same values; the normaliser to FP32."""
    out, lse = backend.decode(cache, 0, q, batch, return_lse=True)
    exact, exact_lse = oracle(cache, 0, q, batch, query="int8")
    peer, _ = bf16_peer(cache, 0, q, batch, query="int8")
    assert (out.double() - exact).norm() <= 1.5 * (peer - exact).norm()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4", "kv4rl"])
@pytest.mark.parametrize(("d", "each"), [(64, 8), (128, 8), (256, 8), (64, 16), (128, 16), (256, 16)])
def test_write_kv_stores_the_references_bits(emulated, monkeypatch, precision, d, each):
    monkeypatch.setattr(host, "WRITE_CHANNELS", each)
    kv = KVConfig(precision, sink_tokens=3, recent_tokens=7)
    shape = CacheShape(1, 2, 1, d, torch.bfloat16)
    ours, reference = (poisoned(kv, shape, 2, 3) for _ in range(2))
    where = TokenSlots.for_chunk(torch.tensor([1, 0]), 2, 0, 18, kv)
    where.page_ids[5] = -1  # a padding row writes nothing
    k, v = vectors(18, 1, d, torch.bfloat16, 1), vectors(18, 1, d, torch.bfloat16, 2)
    k[0], v[0], v[1], k[2], v[3, 0, 7] = 0.0, 0.0, 2.5, 1e4 * k[2], torch.nan
    emulated.write(ours, 0, k, v, where)
    reference.write(0, k, v, where)
    same_contents(ours, reference)


@pytest.mark.parametrize(
    ("precision", "d", "each"),
    [("kv8", 64, 8), ("kv8", 128, 16), ("kv4", 64, 16), ("kv4rl", 128, 8), ("kv4rl", 256, 8), ("kv4", 256, 16)],
)
def test_a_decode_step_leaves_the_other_tokens_of_its_pages_alone(emulated, monkeypatch, precision, d, each):
    """It rewrites more than its tokens' own bytes (PAGE_EACH): yet every byte is the reference's."""
    monkeypatch.setattr(host, "WRITE_CHANNELS", each)
    kv = KVConfig(precision, sink_tokens=2, recent_tokens=5)
    ours, reference = (poisoned(kv, CacheShape(1, 3, 3, d, torch.bfloat16), 6, 3) for _ in range(2))
    table, slots = torch.tensor([[3, 0], [2, 5], [4, 1]]), torch.tensor([2, 0, 1])
    for n in range(1, 19):
        batch = DecodeBatch(table, torch.tensor([n, n % 3 * 7, 33 - n if n > 1 else 0]), slots)
        where = TokenSlots.for_decode(batch, kv)
        assert host.write_defines(ours, where=where)["PAGE_EACH"]
        k, v = (vectors(3, 3, d, torch.bfloat16, 100 * n + i) for i in range(2))
        emulated.write(ours, 0, k, v, where)
        reference.write(0, k, v, where)
    assert torch.equal(ours.main.storage, reference.main.storage)
    same_contents(ours, reference)


def same_contents(ours: KVCache, reference: KVCache) -> None:
    a, b = (cache.main.pages(0, torch.arange(2)) for cache in (ours, reference))
    for name in ("k_codes", "v_codes", "k_scale", "k_offset", "v_scale", "v_offset", "k", "v"):
        if getattr(a, name) is not None:
            assert torch.equal(getattr(a, name).nan_to_num(7), getattr(b, name).nan_to_num(7)), name
    for name in ("k_codes", "v_codes", "k_scale", "v_scale"):
        assert torch.equal(getattr(ours.side, name).nan_to_num(7), getattr(reference.side, name).nan_to_num(7)), name


@pytest.mark.parametrize(("d", "each"), [(64, 8), (128, 8), (128, 16), (256, 16)])
def test_prepared_queries_are_the_references(emulated, monkeypatch, d, each):
    monkeypatch.setattr(host, "WRITE_CHANNELS", each)
    cache = KVCache(KVConfig("kv4"), CacheShape(1, 6, 1, d, torch.bfloat16), num_pages=1, num_slots=1)
    qkv = vectors(5, 8, d, torch.bfloat16, 1)
    qkv[0], qkv[1], qkv[2], qkv[3, :, 7], qkv[4, :3, 7] = 0.0, 1e4 * qkv[1], 1e-6 * qkv[2], torch.inf, torch.nan
    q = qkv[:, 1:7]  # tokens lie apart
    rows = emulated.write(cache, 0, None, None, None, q=q)
    wanted = prepare_query(q, 1)
    assert torch.equal(rows[..., :d].view(torch.int8).float(), wanted.codes.flatten(1, 2))
    tail = rows[..., d : d + 8].view(torch.float32)
    assert torch.equal(tail[..., 0].nan_to_num(7), wanted.scale.flatten(1, 2).nan_to_num(7))
    assert torch.equal(tail[..., 1], wanted.total.flatten(1, 2))


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


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
@pytest.mark.parametrize(("d", "group"), [(64, 3), (128, 5), (256, 12)])
def test_decode_matches_float64(emulated, precision, d, group):
    kv = KVConfig(precision, sink_tokens=4, recent_tokens=20)
    check(emulated, *filled(kv, [0, 1, 16, 17, 24, 25, 130], d=d, group=group))


@pytest.mark.parametrize("precision", ["kv8", "kv4rl"])
def test_the_build_for_racecheck_decodes_the_same_bits(emulated, tmp_path, precision):
    every = Emulated(tmp_path, sound=emulated, EVERY_LANE_ARRIVES=1)
    cache, batch, q = filled(KVConfig(precision, sink_tokens=4, recent_tokens=20), [1, 17, 24, 130, 300])
    assert torch.equal(every.decode(cache, 0, q, batch), emulated.decode(cache, 0, q, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_of_unquantised_pages_matches_float64(emulated, dtype):
    check(emulated, *filled(KVConfig("bf16"), [1, 17, 100], dtype=dtype))


@pytest.mark.parametrize(("s", "w"), [(0, 0), (0, 20), (16, 0), (33, 7), (16, 128), (16, 330)])
def test_decode_matches_float64_for_any_protected_widths(emulated, s, w):
    edges = [15, 16, 17, 143, 144, 145, 161]
    if s + w > 320:  # two rounds of scales beyond those read ahead: both ends of each
        edges = [159, 161, 320, 321, s + w, s + w + 1]
    check(emulated, *filled(KVConfig("kv4rl", sink_tokens=s, recent_tokens=w), edges))


@pytest.mark.parametrize(("precision", "d"), [("kv4", 64), ("kv4", 128), ("kv4rl", 128)])
def test_eight_bit_probabilities_are_as_near_as_the_references(emulated, precision, d):
    """Both round P to 255 steps of a dynamic scale, over tiles of other tokens: errors of one size, below a percent."""
    kv = KVConfig(precision, sink_tokens=4, recent_tokens=20, probability_operand="u8")
    cache, batch, q = filled(kv, [1, 17, 40, 150], d=d, group=3)
    exact, exact_lse = oracle(cache, 0, q, batch, query="int8")
    out, lse = emulated.decode(cache, 0, q, batch, return_lse=True)
    reference = cache.decode(0, q, batch)
    assert (out.double() - exact).norm() <= 2 * (reference.double() - exact).norm()
    assert (out.double() - exact).norm() <= 1e-2 * exact.norm()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


def test_a_request_has_the_same_bits_alone_and_in_a_batch(emulated):
    cache, batch, q = filled(KVConfig("kv4rl", sink_tokens=4, recent_tokens=20), [300, 17, 120], kv_heads=2)
    together = emulated.decode(cache, 0, q, batch)
    for row in range(3):
        part = DecodeBatch(batch.page_table[[row]], batch.context_tokens[[row]], batch.slots[[row]])
        assert torch.equal(emulated.decode(cache, 0, q[[row]], part)[0], together[row])


MUTATIONS = {
    "nibble order of K": ("low = 0x0F0F0F0Fu, high = 0xF0F0F0F0u", "low = 0xF0F0F0F0u, high = 0x0F0F0F0Fu"),
    "nibble order of V": ("a[0] = word & 0x000F000Fu", "a[0] = word & 0x00F000F0u"),
    "window off by one": ("t.begin ? context - recent", "t.begin ? context - recent + 1"),
    "sink counted twice": ("t.begin = context < sink ? context : sink", "t.begin = 0"),
    "tail not masked": ("if (at >= tiles.begin && at < tiles.end) continue;", "if (at >= tiles.begin) continue;"),
    "maximum not rescaled": ("o[n][j][h] *= factor * rescale;", ""),
    "offset dropped": ("offset = sum_over_tokens(softmax.offset[n][h])", "offset = 0.0f"),
    "a chunk's weight": ("total == 0.0f ? 0.0f : exp2_approx(top - merged_top)", "total == 0.0f ? 0.0f : 1.0f"),
    "last arrival missed": ("before == unit.chunks - 1", "before == unit.chunks"),
    "sum not rescaled": ("merged.rescale(weight_of(merged.top, merged.total, top));", ""),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_kernel_is_caught(emulated, tmp_path, name):
    backend = Emulated(tmp_path, MUTATIONS[name], sound=emulated)
    case = filled(KVConfig("kv4rl", sink_tokens=4, recent_tokens=20), [17, 25, 300])
    case[2].mul_(8.0)  # peaked enough for maxima to differ
    with pytest.raises(AssertionError):
        check(backend, *case)
