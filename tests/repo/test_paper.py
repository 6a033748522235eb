"""The paper's numbers as we hold them agree with the paper's own arithmetic."""

import statistics

import pytest

from kv4rl.config import PAGE_TOKENS, GRPOConfig, KVConfig, RolloutConfig
from kv4rl.paper import (
    CHECKPOINTS,
    EVALUATION_TASKS,
    PRECISION_ROWS,
    PUBLISHED,
    REPLAY_SHAPES,
    SOFTWARE,
    TASKS,
    TIMING_SCOPES,
)  # fmt: skip


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


def test_table_a1_is_what_our_defaults_say():
    rollout, grpo, kv = RolloutConfig(), GRPOConfig(), KVConfig()
    fields = ("groups_per_update", "responses_per_group", "max_prompt_tokens", "max_response_tokens", "temperature")
    for name in (*fields, "top_p", "oversubscription", "age_limit", "max_active_requests"):
        assert getattr(rollout, name) == value(f"config/{name}")
    for name in ("learning_rate", "warmup_updates", "weight_decay", "max_grad_norm", "dual_clip", "kl_coefficient"):
        assert getattr(grpo, name) == value(f"config/{name}")
    assert grpo.tis_clip == value("config/tis_clip")
    assert grpo.betas == (value("config/adam_beta1"), value("config/adam_beta2"))
    assert (1 - grpo.clip_low, 1 + grpo.clip_high) == (value("config/clip_lowest"), value("config/clip_highest"))
    assert (kv.sink_tokens, kv.recent_tokens) == (value("config/sink_tokens"), value("config/recent_tokens"))
    assert value("config/page_tokens") == PAGE_TOKENS


def test_counts_multiply_as_the_text_says():
    # A synchronous replica collects 512 responses a round (§C.4): T G over two replicas.
    responses = value("config/groups_per_update") * value("config/responses_per_group")
    assert responses / value("config/replicas") == value("trace/requests_per_replica")
    assert value("config/gpus") == value("config/replicas") * value("config/tensor_parallel")
    assert value("fidelity/prompts") * value("fidelity/positions_per_response") == value("fidelity/states")
    protected = value("config/sink_tokens") + value("config/recent_tokens")
    assert protected == value("fidelity/protected_positions")
    assert value("storage/nvfp4/global_scale_bits") == 32 / 128


def test_the_deficits_of_kv4_are_the_differences_of_table_1():
    for model in ("8b", "4b"):
        gap = value(f"table1/{model}/bf16/mean") - value(f"table1/{model}/kv4/mean")
        assert gap == pytest.approx(value(f"learning/{model}/mean_deficit_kv4"), abs=0.05)
    gap = value("learning/8b/math500/bf16") - value("learning/8b/math500/kv4_deficit")
    assert gap == pytest.approx(value("table1/8b/kv4/math500"), abs=0.05)
    for precision in ("bf16", "kv4rl"):
        exact, rounded = value(f"learning/8b/math500/{precision}"), value(f"table1/8b/{precision}/math500")
        assert exact == pytest.approx(rounded, abs=0.05)


def test_the_trace_ratios_fit_together():
    # Over a fixed set of responses, calls times active requests is the tokens generated: both ratios nearly agree.
    active, calls = value("trace/4b-300/active_batch_ratio"), value("trace/4b-300/fewer_decode_calls")
    assert calls == pytest.approx(active, rel=0.02)
    throughput = active / value("trace/4b-300/step_latency_ratio")
    assert throughput == pytest.approx(value("trace/4b-300/decode_throughput_ratio"), abs=0.005)


def test_shares_of_an_iteration_leave_a_residual():
    rollout, update = (value(f"iteration/8b/{part}_share_kv4rl_last_50") for part in ("rollout", "update"))
    learner = value("iteration/8b/learner_share_kv4rl_last_50")
    assert update < learner and rollout + learner < 100


def test_the_fidelity_checkpoints_and_the_software_are_those_of_appendix_b():
    # The 4B probe shares its checkpoint with the traces; the 8B one comes from between two of them (§B.5).
    assert value("fidelity/4b/checkpoint") in CHECKPOINTS["4b"]
    first, second, _ = CHECKPOINTS["8b"]
    assert first < value("fidelity/8b/checkpoint") < second
    assert {name: version for name, (version, _) in SOFTWARE.items()} == {
        "PyTorch": "2.10.0", "CUDA": "12.8", "vLLM": "0.18.0",
    }  # fmt: skip
    assert all(place.startswith("§B.") for _, place in SOFTWARE.values())


def test_every_checkpoint_has_its_shapes_and_every_timer_its_scope():
    assert set(REPLAY_SHAPES) == {f"{m.upper()}-{update}" for m, updates in CHECKPOINTS.items() for update in updates}
    assert all(len(shapes) == value("replay/phases") for shapes in REPLAY_SHAPES.values())
    assert set(TIMING_SCOPES) == {"decode_replay_ms", "decode_tokens_per_s", "collection_s", "iteration_s"}
