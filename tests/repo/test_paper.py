"""The paper's numbers as we hold them agree with the paper's own arithmetic."""

import statistics

import pytest

from kv4rl.paper import EVALUATION_TASKS, PRECISION_ROWS, PUBLISHED, REPLAY_SHAPES, TASKS


def value(name):
    return PUBLISHED[name].value


@pytest.mark.parametrize("table", ["table1", "table_a5"])
@pytest.mark.parametrize("model", ["8b", "4b"])
@pytest.mark.parametrize("precision", PRECISION_ROWS)
def test_the_mean_column_is_the_mean_of_the_six_tasks(table, model, precision):
    tasks = [value(f"{table}/{model}/{precision}/{task}") for task in TASKS[:-1]]
    # Each cell is rounded to 0.1, so the mean of six may be off by as much as one rounding on each side.
    assert statistics.fmean(tasks) == pytest.approx(value(f"{table}/{model}/{precision}/mean"), abs=0.1001)


def test_kv4rl_stays_within_half_a_point_of_bf16():
    for model in ("8b", "4b"):
        gap = abs(value(f"table1/{model}/kv4rl/mean") - value(f"table1/{model}/bf16/mean"))
        assert gap <= value("learning/accuracy_gap_limit") + 1e-9


def test_hours_give_the_cumulative_speedups():
    for scope in ("rollout", "iteration"):
        ratio = value(f"{scope}/4b/hours_bf16") / value(f"{scope}/4b/hours_kv4rl")
        assert ratio == pytest.approx(value(f"{scope}/4b/cumulative"), abs=0.005)


def test_pools_hold_sixteen_positions_a_page():
    for model in ("4b", "8b"):
        assert value(f"trace/pool_positions_{model}") == 16 * value(f"trace/pool_pages_{model}")
    pool = value("trace/pool_positions_8b") * value("trace/kv_bytes_per_position") / 1e9
    assert pool == pytest.approx(value("trace/8b-400/pool_capacity"), abs=0.05)


def test_kv_bytes_per_position_follow_from_the_shape():
    layers, kv_heads_per_gpu, head_dim, tensors, bytes_each = 36, 4, 128, 2, 2
    assert value("trace/kv_bytes_per_position") == layers * kv_heads_per_gpu * head_dim * tensors * bytes_each


def test_bits_per_element_follow_from_the_formats():
    for group in (128, 32, 16):
        assert value(f"storage/group{group}/bits") == 4 + 32 / group
    assert value("storage/nvfp4/bits") == 4 + 8 / 16 + 32 / 128
    assert value("storage/mxfp4/bits") == 4 + 8 / 32


def test_shapes_fit_the_pinned_positions_and_the_request_limit():
    """The paper cut 8B-400's first context to fit its pool: that holds in positions, not in whole pages per request."""
    for checkpoint, shapes in REPLAY_SHAPES.items():
        positions = value(f"trace/pool_positions_{checkpoint[:2].lower()}")
        assert all(batch <= 1024 and batch * context <= positions for batch, context in shapes)
    batch, context = REPLAY_SHAPES["8B-400"][0]
    assert batch * (context + 2) > value("trace/pool_positions_8b")
    assert batch * -(-context // 16) > value("trace/pool_pages_8b")


def test_every_number_has_a_place_in_the_paper():
    assert all(item.locator and item.unit for item in PUBLISHED.values())
    assert len(EVALUATION_TASKS) == 6
