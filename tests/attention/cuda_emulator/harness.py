"""kernels/cuda on the CPU: the device sources themselves, compiled by a C++ compiler over a small emulator.

The headers beside this file run a block's threads as fibers and give warps, mbarriers, bulk copies and tensor-core
operations their definition in the PTX manual. What they cannot show is timing, and races that fibers do not have.
"""

import atexit
import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from kv4rl.attention import cuda_arguments as host
from kv4rl.attention import jit
from kv4rl.attention.float64 import bf16_peer, oracle
from kv4rl.cache.kv_cache import CacheShape, DecodeBatch, KVCache, TokenSlots
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import KVConfig

EMULATOR = Path(__file__).parent
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


def host_source(text: str) -> str:
    """The device part of a CUDA file as C++: without what launches it."""
    text = re.sub(r'extern "C" int \w+\(.*?\n}\n', "", text, flags=re.DOTALL)
    text = re.sub(r"// Dynamic shared memory and resident blocks.*?\n}\n", "", text, flags=re.DOTALL)
    text = text.replace("__shared__ alignas(16)", "alignas(16) __shared__")
    return text.replace("extern __shared__ uint8_t dynamic[];", "")


FLAGS = ["-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
INCLUDES = [f"-I{EMULATOR}", f"-I{EMULATOR / 'include'}"]


def run_compiler(*arguments: object) -> None:
    command = ["g++", *FLAGS, *map(str, arguments), *INCLUDES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # no AssertionError, which would pass for a mutation that was noticed
        raise RuntimeError(done.stderr[-4000:])


@lru_cache
def precompiled() -> Path:
    """A folder with the emulator's headers precompiled, two thirds of a second for each of a hundred builds."""
    folder = Path(tempfile.mkdtemp(prefix="cuda_emulator_"))
    atexit.register(shutil.rmtree, folder)
    run_compiler("-x", "c++-header", "-o", folder / "emulated.h.gch", EMULATOR / "emulated.h")
    return folder


def compile_sources(directory: Path, name: str, defines: dict, mutation: tuple[str, str] | None = None) -> ctypes.CDLL:
    """Build `name`.cu over the emulator in `directory`, with one piece of text replaced if `mutation` says so."""
    found = False
    for path in jit.sources().glob("*.cu*"):
        text = host_source(path.read_text())
        if path.suffix == ".cuh" and path.stem in REPLACED:
            text = "#pragma once\n"  # emulated.h, which comes before all else
        if mutation is not None and mutation[0] in text:
            found, text = True, text.replace(*mutation)
        (directory / path.name).write_text(text)
    if mutation is not None and not found:
        raise LookupError(f"{mutation} is no longer in the sources")
    driver = f'#include "{name}.cu"\nnamespace kv4rl {{ extern "C" {LAUNCHES[name]} }}\n'
    (directory / "driver.cpp").write_text(driver)
    library = directory / f"{name}.so"
    values = [f"-D{key}={int(value)}" for key, value in defines.items()]
    headers = [f"-I{precompiled()}", "-include", "emulated.h", f"-I{directory}"]
    run_compiler(*headers, *values, "-shared", "-o", library, directory / "driver.cpp")
    return ctypes.CDLL(str(library))


class Emulated:
    """`attention.backends.Backend` over the emulated kernels.

    `mutation` changes the sources of the kernels whose names begin with `mutates`, the others are those of `sound`;
    `also` adds to the defines of decode.
    """

    name = "emulated"

    def __init__(
        self, directory: Path, mutation: tuple[str, str] | None = None, sound=None, mutates="decode", **also: int
    ):
        self.directory, self.mutation, self.sound, self.mutates, self.also = directory, mutation, sound, mutates, also
        self.chunk_weight = CHUNK_WEIGHT if sound is None else sound.chunk_weight
        self.library = lru_cache(self._library)

    def _library(self, name: str, defines: tuple) -> ctypes.CDLL:
        if self.sound is not None and not name.startswith(self.mutates):
            return self.sound.library(name, defines)
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
        space = host.Workspace(cache, *batch.page_table.shape, chunk_weight=self.chunk_weight)
        plan = host.plan_arguments(cache, batch, space.units, space.counters, self.chunk_weight)
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


def poisoned(kv: KVConfig, shape: CacheShape, num_pages: int, num_slots: int) -> KVCache:
    cache = KVCache(kv, shape, num_pages=num_pages, num_slots=num_slots, backend="reference")
    cache.main.storage.fill_(255)
    cache.side.v_codes.fill_(127)
    cache.side.k_scale.fill_(torch.nan)
    cache.side.v_scale.fill_(torch.nan)
    return cache


def vectors(n: int, heads: int, d: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(n, heads, d, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(kv: KVConfig, lengths: list[int], *, d=128, group=4, kv_heads=1, dtype=torch.float32, edit=None):
    """(cache, batch, q): requests on shuffled pages, written by the reference into a poisoned cache.

    `edit(row, q, k, v)` may change a request's vectors before they are written.
    """
    pages = [pages_for(n) for n in lengths]
    rows = len(lengths)
    cache = poisoned(kv, CacheShape(1, group * kv_heads, kv_heads, d, dtype), sum(pages) + 1, rows)
    q = vectors(rows, group * kv_heads, d, dtype, 5)
    order = torch.randperm(sum(pages) + 1, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((rows, max([*pages, 1])), -1)
    for row, n in enumerate(lengths):
        table[row, : pages[row]] = torch.tensor([order.pop() for _ in range(pages[row])])
        where = TokenSlots.for_chunk(table[row], row, 0, n, kv)
        k, v = vectors(n, kv_heads, d, dtype, 10 + row), vectors(n, kv_heads, d, dtype, 90 + row)
        if edit:
            edit(row, q[row], k, v)
        if n:
            cache.write(0, k, v, where)
    return cache, DecodeBatch(table, torch.tensor(lengths), torch.arange(rows)), q


def growing_values(precision: str):
    """(cache, batch, q): value scales a thousand times larger in the later half of a context."""

    def edit(row, q, k, v):
        v[200:] *= 1000

    return filled(KVConfig(precision, sink_tokens=4, recent_tokens=20), [400], edit=edit)


def late_maximum(precision: str):
    """(cache, batch, q): the last tile of main pages holds one key that gets all the weight of its query."""
    kv = KVConfig(precision, sink_tokens=4, recent_tokens=20)

    def edit(row, q, k, v):
        k[-1 - kv.recent_tokens * (precision == "kv4rl"), 0] = 40 * q[0]

    return filled(kv, [400, 399], edit=edit)


def check(backend, cache, batch, q):
    """Each request no further from float64 than 1.5 times BF16 attention on the same values; the normaliser to FP32."""
    out, lse = backend.decode(cache, 0, q, batch, return_lse=True)
    exact, exact_lse = oracle(cache, 0, q, batch, query="int8")
    peer, _ = bf16_peer(cache, 0, q, batch, query="int8")
    size, error, allowed = (x.flatten(1).norm(dim=1) for x in (exact, out.double() - exact, peer - exact))
    assert (error <= 1.5 * allowed + 1e-6 * size).all(), (error / size, allowed / size)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


def kept(values: torch.Tensor) -> torch.Tensor:
    """For a comparison in which a NaN equals any NaN, and an infinity nothing but itself."""
    return values.nan_to_num(7, torch.inf, -torch.inf)


def same_contents(ours: KVCache, reference: KVCache) -> None:
    a, b = (cache.main.pages(0, torch.arange(2)) for cache in (ours, reference))
    for name in ("k_codes", "v_codes", "k_scale", "k_offset", "v_scale", "v_offset", "k", "v"):
        if getattr(a, name) is not None:
            assert torch.equal(kept(getattr(a, name)), kept(getattr(b, name))), name
    for name in ("k_codes", "v_codes", "k_scale", "v_scale"):
        assert torch.equal(kept(getattr(ours.side, name)), kept(getattr(reference.side, name))), name
