"""kernels/cuda/schedule.cuh on the host: what a request is divided into, for every length and width."""

import ctypes
import itertools
import subprocess

import pytest
import torch

from kv4rl.attention import cuda_arguments, jit
from kv4rl.attention.backends import BackendUnavailable
from kv4rl.attention.live_pages import live_pages
from kv4rl.attention.regions import regions, side_entry
from kv4rl.cache.kv_cache import DecodeBatch
from kv4rl.cache.main_cache import pages_for
from kv4rl.config import PAGE_TOKENS, KVConfig

HOST = """
#include "schedule.cuh"
using namespace kv4rl;
extern "C" void tiles(int n, int s, int w, int* out) {
  Tiles t = tiles_of(n, s, w);
  int const all[6] = {t.side, t.first_page, t.pages, t.begin, t.end, t.weight()};
  for (int i = 0; i < 6; ++i) out[i] = all[i];
}
extern "C" int page_tokens() { return kPageTokens; }
extern "C" int chunks(int n, int s, int w, int weight, int* starts) {
  Tiles t = tiles_of(n, s, w);
  int const k = chunk_count(t, weight);
  for (int i = 0; i <= k; ++i) starts[i] = chunk_start(t, i, k, weight);
  return k;
}
"""
WIDTHS = [(0, 0), (16, 128), (0, 128), (16, 0), (4, 20), (33, 7), (1, 1)]
LENGTHS = [*range(0, 400), 1023, 1024, 1025, 3071, 3072, 3073, 20000, 131072]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    directory = tmp_path_factory.mktemp("schedule")
    (directory / "host.cu").write_text(HOST)
    try:
        nvcc = jit.compiler()
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    library = directory / "host.so"
    extra = ("-shared", "-Xcompiler", "-fPIC", f"-I{jit.sources()}")
    command = jit.compile_command(nvcc, directory / "host.cu", library, {}, *extra)
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(library))


def tiles(schedule, n, s, w):
    out = (ctypes.c_int * 6)()
    schedule.tiles(n, s, w, out)
    return dict(zip(("side", "first_page", "pages", "begin", "end", "weight"), out, strict=True))


@pytest.mark.parametrize(("s", "w"), WIDTHS)
def test_every_position_is_read_exactly_once(schedule, s, w):
    for n in LENGTHS[:400]:
        t = tiles(schedule, n, s, w)
        assert (t["begin"], t["end"]) == regions(n, s, w).main
        pages = range(t["first_page"], t["first_page"] + t["pages"])
        in_main = [p for page in pages for p in range(16 * page, 16 * page + 16) if t["begin"] <= p < t["end"]]
        valid_entries = set(range(min(n, s + w)))
        assert t["side"] == -(-len(valid_entries) // 16)
        protected = [p for p in range(n) if not t["begin"] <= p < t["end"]]
        assert {side_entry(p, s, w) for p in protected} == valid_entries
        assert sorted(in_main + protected) == list(range(n))


@pytest.mark.parametrize(("s", "w"), WIDTHS)
def test_the_page_list_is_not_one_page_too_long_where_the_last_page_is_full(schedule, s, w):
    """The kernel's list, the reference's and the allocator's: each page of it holds 1 to 16 of the main positions."""
    for n in LENGTHS[:400]:
        t = tiles(schedule, n, s, w)
        ours = list(range(t["first_page"], t["first_page"] + t["pages"]))
        start, stop = (torch.tensor([bound]) for bound in regions(n, s, w).main)
        assert ours == live_pages(torch.arange(pages_for(n))[None], start, stop).page_ids.tolist()
        assert all(t["begin"] < 16 * page + 16 and 16 * page < t["end"] for page in ours)
        assert n == 0 or 1 <= n - 16 * (pages_for(n) - 1) <= 16


@pytest.mark.parametrize(("s", "w"), WIDTHS)
@pytest.mark.parametrize("weight", [4, 64, 128, 192])
def test_chunks_cover_all_tiles_in_order_evenly_or_graded(schedule, s, w, weight):
    starts = (ctypes.c_int * (cuda_arguments.MAX_CHUNKS + 1))()
    for n in LENGTHS:
        k = schedule.chunks(n, s, w, weight, starts)
        t = tiles(schedule, n, s, w)
        bounds = list(starts)[: k + 1]
        assert 1 <= k <= cuda_arguments.MAX_CHUNKS
        assert (bounds[0], bounds[-1]) == (0, t["side"] + t["pages"])
        assert bounds == sorted(bounds)

        def cost(a, b, side=t["side"]):
            return 2 * (min(b, side) - min(a, side)) + max(b, side) - max(a, side)

        parts = [cost(a, b) for a, b in itertools.pairwise(bounds)]
        assert sum(parts) == t["weight"]
        if weight < cuda_arguments.GRADED_WEIGHT:
            assert max(parts) - min(parts) <= 3
        else:
            last = min(k, 3)
            shares = [1] * (k - last) + [last * (2 * j - 1) / last**2 for j in range(last, 0, -1)]  # of weight / k
            for part, share in zip(parts, shares, strict=True):
                assert abs(part - t["weight"] * share / k) <= 3


def test_a_short_context_is_one_chunk(schedule):
    starts = (ctypes.c_int * (cuda_arguments.MAX_CHUNKS + 1))()
    for weight in cuda_arguments.CHUNK_WEIGHTS:
        assert schedule.chunks(16 * weight, 0, 0, weight, starts) == 1
        assert schedule.chunks(16 * weight + 1, 0, 0, weight, starts) == 2


def test_no_page_size_but_the_compiled_one_can_be_asked_for(schedule):
    assert schedule.page_tokens() == PAGE_TOKENS == 16
    with pytest.raises(TypeError, match="page_tokens"):
        KVConfig("kv4", page_tokens=32)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 1024])
def test_a_workspace_need_not_grow_after_capture_it_has_room_for_every_chunk(schedule, rows):
    starts = (ctypes.c_int * (cuda_arguments.MAX_CHUNKS + 1))()
    weight = cuda_arguments.chunk_weight_of(rows, 4)
    for n in LENGTHS:
        for s, w in WIDTHS:
            room = cuda_arguments.most_chunks(max(1, -(-n // 16)), (s, w), weight)
            assert schedule.chunks(n, s, w, weight, starts) <= room


def test_a_batch_made_in_inference_mode_has_no_write_count_and_still_gets_a_plan():
    make = lambda: DecodeBatch(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), torch.zeros(1))
    plain = make()
    before = plain.versions()
    plain.context_tokens.add_(1)
    assert plain.versions() != before
    with torch.inference_mode():
        assert make().versions() == (0, 0, 0)
