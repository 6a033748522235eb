"""Mistakes put into the CUDA sources one at a time: the comparison that the sound source passes must notice each."""

import pytest
import torch
from cuda_emulator.harness import Emulated, check, filled, growing_values, late_maximum

from kv4rl.config import KVConfig

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
UNPROTECTED_MUTATIONS = {
    "value metadata of masked tokens kept, INT4": ("kv4", "m.v_scale[i] = m.v_offset[i] = 0.0f;", ""),
    "value metadata of masked tokens kept, INT8": ("kv8", "m.v_scale[i] = m.v_offset[i] = 0.0f;", ""),
    "tail not masked, INT8": (
        "kv8", "if (at >= tiles.begin && at < tiles.end) continue;", "if (at >= tiles.begin) continue;"
    ),
    "key and value scales exchanged, INT8": (
        "kv8", "k_scale[i] = scales.x, m.v_scale[i] = scales.y", "k_scale[i] = scales.y, m.v_scale[i] = scales.x"
    ),
    "bytes of a value word, INT8": ("kv8", "i & 1 ? 0x4342 : 0x4140", "i & 1 ? 0x4140 : 0x4342"),
    "query words exchanged, INT8": ("kv8", "second.z, second.w, b.z, b.w", "second.z, second.w, b.x, b.y"),
    "elements beyond the tail kept, BF16": ("bf16", "if (first + token >= valid) r[i] = {0u, 0u};", ""),
    "channels of a pair exchanged, BF16": ("bf16", "w[0], w[1], 0x5410", "w[0], w[1], 0x7632"),
    "key tokens exchanged, BF16": (
        "bf16", "early.x, late.x, early.y, late.y, b.x", "late.x, early.x, late.y, early.y, b.x"
    ),
}  # fmt: skip
PLAN_MUTATIONS = {
    "a chunk one tile short": ("chunk.first_tile, chunk.last_tile, i", "chunk.first_tile, chunk.last_tile - 1, i"),
    "slot forgotten": ("context, slot, chunk", "context, 0, chunk"),
    "partials shared by requests": ("atomicAdd(&partials, chunks) : -1", "0 : -1"),
    "places of units shared": ("sum += count;", "sum = count;"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_kernel_is_caught(emulated, tmp_path, name):
    backend = Emulated(tmp_path, MUTATIONS[name], sound=emulated)
    case = filled(KVConfig("kv4rl", sink_tokens=4, recent_tokens=20), [17, 25, 300])
    case[2].mul_(8.0)  # peaked enough for maxima to differ
    with pytest.raises(AssertionError):
        check(backend, *case)


@pytest.mark.parametrize("name", UNPROTECTED_MUTATIONS)
def test_a_mutated_kernel_of_another_precision_is_caught(emulated, tmp_path, name):
    """Without a recent window a context ends in the page's poisoned tail."""
    precision, *mutation = UNPROTECTED_MUTATIONS[name]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with pytest.raises(AssertionError):
        check(Emulated(tmp_path, mutation, sound=emulated), *filled(KVConfig(precision), [17, 25, 130], dtype=dtype))


@pytest.mark.parametrize("name", PLAN_MUTATIONS)
def test_a_mutated_plan_is_caught(emulated, tmp_path, name):
    backend = Emulated(tmp_path, PLAN_MUTATIONS[name], sound=emulated, mutates="plan")
    with pytest.raises(AssertionError):
        check(backend, *filled(KVConfig("kv4rl", sink_tokens=4, recent_tokens=20), [200, 25, 300]))


@pytest.mark.parametrize(
    ("case", "mutation"),
    [
        (growing_values, ("risen = kReference && most * inverse > kOperandTop", "risen = false")),
        (late_maximum, ("risen || seen[n][h] > top[n][h]", "risen || top[n][h] == -INFINITY")),
        (late_maximum, ("float const seen = max_over_tokens(lane_max[n][h]);", "float const seen = lane_max[n][h];")),
    ],
    ids=["reference scale of P never raised", "maximum never re-reduced", "maximum of one lane"],
)
def test_a_mutated_running_maximum_is_caught(emulated, monkeypatch, tmp_path, case, mutation):
    monkeypatch.setattr(emulated, "chunk_weight", 64)
    with pytest.raises(AssertionError):
        check(Emulated(tmp_path, mutation, sound=emulated), *case("kv4"))
