"""Decode on the CPU emulator (cuda_emulator/) against float64, over poisoned pages and side slots."""

import ctypes

import pytest
import torch
from cuda_emulator.harness import CHUNK_WEIGHT, Emulated, check, filled, growing_values, late_maximum

from kv4rl.attention import cuda_arguments as host
from kv4rl.attention.float64 import bf16_peer, oracle
from kv4rl.cache.kv_cache import DecodeBatch
from kv4rl.config import KVConfig
from kv4rl.formats.packing import split_chunk


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
@pytest.mark.parametrize(("d", "group"), [(64, 3), (128, 5), (128, 6), (256, 12)])
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


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_zero_constant_and_huge_vectors_decode_as_near_as_others(emulated, zero_constant_and_huge, precision):
    kv = KVConfig(precision, sink_tokens=4, recent_tokens=20)
    check(emulated, *filled(kv, [40, 40, 40, 40, 70], edit=zero_constant_and_huge))


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_value_scales_may_grow_in_later_tiles(emulated, monkeypatch, precision):
    monkeypatch.setattr(emulated, "chunk_weight", 64)
    check(emulated, *growing_values(precision))


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_maximum_may_rise_in_the_last_tile(emulated, monkeypatch, precision):
    monkeypatch.setattr(emulated, "chunk_weight", 64)
    check(emulated, *late_maximum(precision))


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_no_scale_or_offset_is_accepted_and_ignored(emulated, precision):
    kv = KVConfig(precision, sink_tokens=4, recent_tokens=20)
    cache, batch, q = filled(kv, [130])
    view = split_chunk(cache.main.storage[0], precision, 128, torch.float32)
    numbers = [view.k_scale, view.k_offset, view.v_scale, view.v_offset]
    numbers += [cache.side.k_scale, cache.side.v_scale] if precision == "kv4rl" else []
    before = emulated.decode(cache, 0, q, batch)
    for each in (x for x in numbers if x is not None):
        each.mul_(1.5)
        after = emulated.decode(cache, 0, q, batch)
        assert not torch.equal(after, before)
        check(emulated, cache, batch, q)
        before = after


def test_each_part_of_a_request_has_one_owner_and_its_own_memory(emulated):
    """No tile, chunk or partial result belongs to two units of a plan, or to none."""
    cache, batch, _ = filled(KVConfig("kv4rl", sink_tokens=4, recent_tokens=20), [300, 0, 17, 200, 299])
    space = host.Workspace(cache, *batch.page_table.shape, chunk_weight=CHUNK_WEIGHT)
    plan = host.plan_arguments(cache, batch, space.units, space.counters, CHUNK_WEIGHT)
    emulated.library("plan", ()).run(ctypes.byref(plan))
    units = space.units.view(torch.int32).view(-1, 8)[: space.counters[0]]  # schedule.cuh: Unit
    partials = []
    for row in range(5):
        mine = units[units[:, 0] == row]
        mine = mine[mine[:, 5].argsort()]
        _, _, _, first, last, chunk, chunks, partial = mine.T
        assert chunk.tolist() == list(range(len(mine))) and chunks.eq(len(mine)).all()
        assert first[0] == 0 and torch.equal(first[1:], last[:-1])
        partials += (partial + chunk).tolist() if len(mine) > 1 else []
    assert len(set(partials)) == len(partials) > 0
    assert max(partials) < len(space.partial) // (4 * (128 + host.SUMS_TAIL))


@pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4", "kv4rl"])
def test_pad_lanes_beyond_a_length_that_ends_in_mid_tile_are_not_counted(emulated, precision):
    """Over zero keys each token weighs the same, so the normaliser counts them: exp(lse) is the length."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def edit(row, q, k, v):
        k.zero_()

    kv = KVConfig(precision, sink_tokens=4, recent_tokens=20)
    cache, batch, q = filled(kv, [1, 15, 16, 17, 31, 33, 63, 64, 65, 79, 81], group=3, dtype=dtype, edit=edit)
    lse = emulated.decode(cache, 0, q, batch, return_lse=True)[1]
    torch.testing.assert_close(lse.exp(), batch.context_tokens[:, None].expand(-1, 3).float(), rtol=1e-5, atol=0)
    check(emulated, cache, batch, q)


@pytest.mark.parametrize("precision", ["kv8", "kv4rl"])
def test_no_step_gives_nan_whatever_the_workspace_of_split_contexts_held(emulated, monkeypatch, precision):
    """Steps whose requests change lengths, and so numbers of chunks; partial results and units hold NaN and -1."""

    class Dirty(host.Workspace):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.partial.fill_(torch.nan)
            self.units.fill_(255)

    monkeypatch.setattr(host, "Workspace", Dirty)
    cache, batch, q = filled(KVConfig(precision, sink_tokens=4, recent_tokens=20), [420, 300, 130], group=2)
    generator = torch.Generator().manual_seed(9)
    for _ in range(6):
        lengths = (torch.rand(3, generator=generator) * (batch.context_tokens + 1)).long()
        check(emulated, cache, DecodeBatch(batch.page_table, lengths, batch.slots), q)


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_a_cache_of_other_slots_changes_a_split_requests_bits_by_rounding_only(emulated, monkeypatch, precision):
    """The chunk weight follows from a cache's slots: one cache splits a request in one way, in any batch.

    Split in another way, sums differ by FP32's rounding (seen in the normaliser, which has no P in it), the output also
    by that of P relative to another running maximum: less than half of what BF16 attention errs.
    """
    assert host.chunk_weight_of(8, 4) < host.chunk_weight_of(64, 4) < host.chunk_weight_of(1024, 4)
    cache, batch, q = filled(KVConfig(precision, sink_tokens=4, recent_tokens=20), [300, 17, 420])
    backwards = DecodeBatch(*(x.flip(0) for x in (batch.page_table, batch.context_tokens, batch.slots)))
    found = []
    for weight in (3, 6, 64):
        monkeypatch.setattr(emulated, "chunk_weight", weight)
        found.append(emulated.decode(cache, 0, q, batch, return_lse=True))
        again = emulated.decode(cache, 0, q.flip(0), backwards, return_lse=True)
        assert all(torch.equal(a.flip(0), b) for a, b in zip(again, found[-1], strict=True))
    whole, whole_lse = found.pop()
    peer, exact = (attend(cache, 0, q, batch, query="int8")[0] for attend in (bf16_peer, oracle))
    for out, lse in found:
        assert torch.equal(out[1], whole[1]) and not torch.equal(out, whole)  # 17 tokens are never split
        moved, allowed = ((a - b).flatten(1).norm(dim=1) for a, b in ((out, whole), (peer, exact)))
        assert (moved <= 0.5 * allowed).all(), (moved, allowed)
        torch.testing.assert_close(lse, whole_lse, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-6)
