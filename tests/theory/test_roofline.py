"""Fig. 3a and the step-cost model: the paper's nominal figures to the digit, our measured ones within a band."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv4rl.config import PRECISIONS, KVConfig
from kv4rl.paper import PUBLISHED, REPLAY_SHAPES
from kv4rl.results import read_rows
from kv4rl.theory import roofline as r
from kv4rl.theory.step_cost import Rates, StepCost
from kv4rl.viz.kernels import TABLE_A3

MEASURED_GEMM_MS = {  # one H200, TP2 shard, 36 layers and head
    r.QWEN3_4B: {168: 1.87, 272: 2.27, 400: 3.08, 640: 3.93},
    r.QWEN3_8B: {176: 2.94, 256: 3.23, 368: 4.22},
}


def test_the_papers_nominal_figures_to_the_digit():
    assert r.weight_bytes(r.QWEN3_4B, tensor_parallel=2) == 4.022272e9
    assert r.flops_per_token(r.QWEN3_4B, tensor_parallel=2) == 4.022272e9
    for model in (r.QWEN3_4B, r.QWEN3_8B):
        assert r.kv_bytes_per_token(model, tensor_parallel=2) == 73728
    assert r.weight_bytes(r.QWEN3_4B, tensor_parallel=2) == PUBLISHED["roofline/weight_bytes_4b_tp2"].value * 1e9
    assert r.kv_bytes_per_token(r.QWEN3_8B, tensor_parallel=2) == PUBLISHED["trace/kv_bytes_per_position"].value


def test_the_8b_model_follows_from_its_configuration():
    # 36 x (4096 x 128 x (2 x 32 + 2 x 8) + 3 x 4096 x 12288) + 4096 x 151936, two bytes each, half a model per GPU.
    assert r.weight_bytes(r.QWEN3_8B, tensor_parallel=2) == 7.56809728e9


def test_a_transformers_configuration_gives_the_same_shape():
    from transformers import Qwen3Config

    config = Qwen3Config(
        num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    assert r.ModelShape.from_config(config) == r.QWEN3_4B
    fields = config.to_dict()
    assert r.ModelShape.from_config(fields) == r.QWEN3_4B
    del fields["head_dim"]
    assert r.ModelShape.from_config(fields).head_dim == 2560 // 32
    del fields["vocab_size"]
    with pytest.raises(ValueError, match=r"config=\['vocab_size'\]: expected all of num_hidden_layers"):
        r.ModelShape.from_config(fields)


def test_kv_is_the_largest_demand_at_every_4b_replay_shape():
    # Fig. 3a: "KV reads constitute the largest idealized service demand throughout the measured traces".
    for checkpoint, shapes in REPLAY_SHAPES.items():
        if checkpoint.startswith("4B"):
            for batch, context in shapes:
                found = r.demands(r.QWEN3_4B, batch, batch * context, tensor_parallel=2)
                assert found.largest == "kv", (checkpoint, batch, context)
                assert found.weights_ms == pytest.approx(4.022272 / 4.8)


@given(st.floats(1, 2000), st.floats(0, 1e7))
def test_demands_scale_as_they_should(active, context):
    one = r.demands(r.QWEN3_8B, active, context, tensor_parallel=2)
    two = r.demands(r.QWEN3_8B, 2 * active, 2 * context, tensor_parallel=2)
    assert two.weights_ms == one.weights_ms
    assert two.compute_ms == pytest.approx(2 * one.compute_ms) and two.kv_ms == pytest.approx(2 * one.kv_ms)
    half = r.demands(r.QWEN3_8B, active, context, tensor_parallel=4)
    assert half.kv_ms == pytest.approx(one.kv_ms / 2)


@pytest.mark.parametrize("ranks", [0, 3, 16, 1.5])
def test_a_tensor_parallel_size_that_does_not_divide_the_heads_is_named(ranks):
    with pytest.raises(ValueError, match=f"tensor_parallel={ranks}: expected a divisor of kv_heads=8"):
        r.weight_bytes(r.QWEN3_4B, tensor_parallel=ranks)


def test_shapes_and_states_out_of_range_are_named():
    with pytest.raises(ValueError, match="layers=0"):
        r.ModelShape(0, 1, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="query_heads=3: expected a multiple of 2"):
        r.ModelShape(1, 1, 1, 3, 2, 1, 1)
    with pytest.raises(ValueError, match="active_requests=0"):
        r.demands(r.QWEN3_4B, 0, 1)


def test_the_cost_model_meets_the_measured_gemm_times_within_its_stated_band():
    for model, measured in MEASURED_GEMM_MS.items():
        rates = Rates(all_reduce_s=0, all_reduce_s_per_element=0)
        for batch, milliseconds in measured.items():
            assert float(StepCost(model, rates=rates)(batch, 0)) == pytest.approx(milliseconds, rel=0.20)


def test_the_attention_rates_are_the_measured_ones():
    arms = {"bf16": "bf16_flashinfer", "kv8": "kv8", "kv4": "kv4", "kv4rl": "kv4rl"}
    for precision, arm in arms.items():
        rows = read_rows("kernels.csv", arm=arm, metric="kv_bytes_per_s", model="tp2_16q4kv")
        rate = statistics.fmean(float(row["value"]) for row in rows if row["shape"] in TABLE_A3)
        assert Rates().attention_bandwidth[precision] == pytest.approx(rate, rel=0.1)


def test_cache_bytes_are_the_formats():
    per_position = {p: StepCost(r.QWEN3_4B, KVConfig(p)).page_bytes / 16 for p in PRECISIONS}
    assert per_position["bf16"] == 73728
    assert per_position["kv4"] == per_position["kv4rl"] == 73728 * 4.25 / 16  # §5.1: 4.25 bits per element
    assert per_position["kv8"] == 73728 * 8.125 / 16
    # 144 positions of 2 x 128 codes and two FP16 scales, 4 heads a GPU, 36 layers.
    assert StepCost(r.QWEN3_4B, KVConfig("kv4rl")).slot_bytes == 144 * 260 * 4 * 36
    assert StepCost(r.QWEN3_4B, KVConfig("kv4")).slot_bytes == 0


def test_protected_positions_are_read_once_in_int8_and_not_in_int4():
    cost = StepCost(r.QWEN3_4B, KVConfig("kv4rl"))
    assert cost.kv_bytes(2, 2 * 144) == 2 * cost.slot_bytes
    assert cost.kv_bytes(2, 2 * 50) == pytest.approx(2 * 50 * cost.slot_bytes / 144)
    expected = 2 * (cost.slot_bytes + (1000 - 144) * cost.page_bytes / 16)
    assert cost.kv_bytes(2, 2 * 1000) == pytest.approx(expected)


def test_speedups_are_ordered_as_the_papers_and_grow_with_the_context():
    for checkpoint in ("4B-100", "4B-300", "4B-500"):
        means = []
        for precision in ("kv8", "kv4rl", "kv4"):
            cost, reference = StepCost(r.QWEN3_4B, KVConfig(precision)), StepCost(r.QWEN3_4B)
            shapes = REPLAY_SHAPES[checkpoint]
            shares = [float(cost(b, b * n)) / float(reference(b, b * n)) for b, n in shapes]
            means.append(len(shares) / sum(shares))  # Eq. A2
        assert 1 < means[0] < means[1] < means[2]


def test_rates_without_a_precision_are_named():
    with pytest.raises(ValueError, match="a rate for bf16, kv8, kv4, kv4rl"):
        Rates(attention_bandwidth={"bf16": 1.0})
    with pytest.raises(ValueError, match="gemm_flops=0"):
        Rates(gemm_flops=0)
