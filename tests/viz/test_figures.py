"""Figures show the data they are given, in the project's colours."""

import numpy as np
import pytest

from kv4rl.config import KVConfig
from kv4rl.viz.fidelity import sampler_kl_bars
from kv4rl.viz.kernels import kernel_speedups, roofline, speedup_table, write_times
from kv4rl.viz.memory import bytes_per_position, response_bytes
from kv4rl.viz.style import PRECISION_COLOURS
from kv4rl.viz.training import learning_curves, occupancy, tis_weights, token_ages, trailing_mean


def test_side_buffer_is_paid_once_a_response():
    tokens = np.array([16, 1600])
    plain = response_bytes(KVConfig("kv4"), tokens, head_dim=128)
    protected = response_bytes(KVConfig("kv4rl"), tokens, head_dim=128)
    assert plain.tolist() == [2176, 217600]
    assert (protected - plain).tolist() == [144 * 260] * 2


def test_kv4rl_beats_kv8_from_302_positions_on():
    tokens = np.arange(16, 1600, 16)
    cheaper = response_bytes(KVConfig("kv4rl"), tokens, head_dim=128) < response_bytes(
        KVConfig("kv8"), tokens, head_dim=128
    )
    assert tokens[np.argmax(cheaper)] == 304 and cheaper[np.argmax(cheaper) :].all()


def test_kl_bars_keep_the_order_of_precisions_and_their_intervals():
    rows = [
        {"arm": arm, "value": value, "low": value * 0.5, "high": value * 2}
        for arm, value in (("kv4", 1e-2), ("kv8", 1e-4), ("kv4rl", 1e-3), ("other", 1.0))
    ]
    bar = sampler_kl_bars(rows).data[0]
    assert list(bar.x) == ["KV8", "KV4", "KV4-RL"]
    assert list(bar.error_y.arrayminus) == pytest.approx([0.5e-4, 0.5e-2, 0.5e-3])
    assert list(bar.marker.color) == [PRECISION_COLOURS[p] for p in ("kv8", "kv4", "kv4rl")]


def test_trailing_mean_uses_what_is_there_at_the_start():
    assert trailing_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1, 2, 4, 6]


NAMES = ("critic/score/mean", "response_length/mean", "actor/kl_loss", "rollout_corr/k3_kl")


def test_one_run_is_drawn_raw_and_smooth_in_every_panel():
    lines = [dict.fromkeys(NAMES, value) for value in (0.0, 1.0, 5.0)]
    figure = learning_curves({"kv4": [lines], "kv4rl": [lines]}, window=2)
    assert len(figure.data) == 2 * 4 * 2
    raw, smooth = figure.data[:2]
    assert list(raw.y) == [0, 1, 5] and list(smooth.y) == [0, 0.5, 3]


def test_seeds_are_drawn_as_their_mean_within_students_t_interval():
    runs = [[dict.fromkeys(NAMES, value)] * length for value, length in ((1.0, 4), (2.0, 3), (3.0, 3))]
    shade, mean = learning_curves({"kv4": runs}).data[:2]
    assert list(mean.y) == [2, 2, 2] and len(shade.y) == 6
    assert max(shade.y) == pytest.approx(2 + 4.303 / 3**0.5) and min(shade.y) == pytest.approx(2 - 4.303 / 3**0.5)


def test_ages_sum_to_one_and_empty_input_draws_empty():
    assert sum(token_ages([0, 0, 1, 3]).data[0].y) == pytest.approx(1)
    assert sum(token_ages([]).data[0].y) == 0


def test_occupancy_marks_every_collection_boundary():
    trace = {"active_requests": [1, 2, 3, 4], "used_pages": [1, 1, 2, 2], "collection": [0, 0, 1, 2]}
    assert len(occupancy(trace, 10).layout.shapes) == 2


def test_memory_and_weight_figures_build():
    assert len(bytes_per_position(head_dim=128, sink_tokens=16, recent_tokens=128).data) == 4
    assert tis_weights([0.5, 1.0, 5.0], 5.0).layout.shapes


def test_kernel_bars_are_ordered_by_context_and_leave_gaps_for_missing_rows():
    rows = [
        {"arm": "kv4", "shape": "176x6972", "value": "3.3"},
        {"arm": "kv4", "shape": "608x621", "value": "3.8"},
        {"arm": "kv4rl", "shape": "608x621", "value": "2.9"},
        {"arm": "kv4", "shape": "ragged-4B-300", "value": "3.2"},
    ]
    figure = kernel_speedups(rows)
    assert list(figure.data[1].x) == ["608 x 621", "176 x 6972"] and list(figure.data[1].y) == [3.8, 3.3]
    assert list(figure.data[2].y) == [2.9, None]


def kernel_row(arm, shape, metric, value):
    return {"arm": arm, "shape": shape, "metric": metric, "value": str(value)}


def test_shapes_come_by_kind_and_context_and_write_times_by_format():
    shapes = ["1x1024", "640x874", "ragged-4B", "608x621"]
    rows = [kernel_row("bf16_flashinfer", shape, "ms_per_layer", 0.25) for shape in shapes]
    rows += [kernel_row("kv4", shape, "speedup_vs_bf16", 3.5) for shape in shapes]
    lines = speedup_table(
        [*rows, kernel_row("kv4", "64", "write_kv_us", 2.5), kernel_row("kv8", "64", "write_kv_us", 2)]
    )
    assert [line["batch x context"] for line in lines] == ["608x621", "640x874", "1x1024", "ragged-4B"]
    assert lines[0] == {
        "batch x context": "608x621", "BF16 FlashInfer": "250.0 us", "KV8": "-", "KV4": "3.50x", "KV4-RL": "-",
        "KV4, 8-bit P": "-", "our BF16": "-",
    }  # fmt: skip
    writes = [kernel_row("kv4", n, "write_kv_us", us) for n, us in (("64", 2.5), ("640", 4.94))]
    assert write_times([*writes, kernel_row("kv8", "64", "write_kv_us", 2)]) == [
        "KV8 2.0 us for 64 tokens", "KV4 2.5 us for 64 tokens, 4.9 us for 640 tokens",
    ]  # fmt: skip


def test_roofline_places_a_launch_by_its_operations_and_bytes():
    """Ten requests of 100 positions, 16 heads of 128: 8.192e6 operations, over 1e6 bytes in 1 ms."""
    metrics = {"ms_per_layer": 1.0, "kv_bytes_per_s": 1e9, "share_of_copy_rate": 0.25}
    rows = [kernel_row("kv4", "10x100", metric, value) for metric, value in metrics.items()]
    figure = roofline(rows, flops_per_s=8e11, query_heads=16, head_dim=128)
    found = {trace.name.split(":")[0]: trace for trace in figure.data}
    assert found["KV4"].x[0] == pytest.approx(8.192) and found["KV4"].y[0] == pytest.approx(8.192e6 / 1e-3 / 1e12)
    assert list(found["roofs"].x) == pytest.approx([1, 200, 800]) and found["roofs"].y[0] == pytest.approx(0.004)
