"""The reference decode against float64 on the dequantised cache; the yardstick is BF16 attention on the same values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.attention import reference
from kv4rl.cache.kv_cache import DecodeBatch
from kv4rl.config import KVConfig
from kv4rl.formats.affine import dequantize_affine, quantize_affine
from kv4rl.formats.packing import split_chunk
from kv4rl.formats.symmetric import dequantize_symmetric, quantize_symmetric

CONTEXTS = [300, 0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 143, 144, 145, 159, 160, 161, 304, 305, 431]
# How often BF16's own error each arithmetic may err: FP16 P is finer than BF16 P; 8-bit P is coarser.
ARITHMETIC = {
    "bf16": (KVConfig("bf16"), 0.01),
    "kv8": (KVConfig("kv8"), 0.1),
    "kv4": (KVConfig("kv4"), 0.3),
    "kv4rl": (KVConfig("kv4rl"), 1.0),
    "kv4-u8": (KVConfig("kv4", probability_operand="u8"), 10.0),
    "kv4rl-u8": (KVConfig("kv4rl", probability_operand="u8"), 10.0),
}
arithmetics = pytest.mark.parametrize(("kv", "times"), ARITHMETIC.values(), ids=ARITHMETIC.keys())
precisions = pytest.mark.parametrize("precision", ["bf16", "kv8", "kv4", "kv4rl"])


@arithmetics
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ragged_contexts_follow_the_oracle(make_case, kv, times, head_dim):
    assert make_case(CONTEXTS, kv, head_dim=head_dim).follows_oracle(times)


@arithmetics
@pytest.mark.parametrize("context", CONTEXTS[:1] + CONTEXTS[2:])
def test_each_context_alone_follows_the_oracle(make_case, kv, times, context):
    assert make_case([context], kv, group=8, kv_heads=1).follows_oracle(times)


@pytest.mark.parametrize("precision", ["kv4", "kv4rl"])
@pytest.mark.parametrize("group", range(1, 17))
def test_any_group_of_query_heads_follows_the_oracle(make_case, precision, group):
    assert make_case([290, 17, 145], KVConfig(precision), group=group, head_dim=64).follows_oracle(1.0)


@settings(deadline=None, max_examples=40)
@given(
    arithmetic=st.sampled_from(sorted(ARITHMETIC)),
    contexts=st.lists(st.integers(0, 400), min_size=1, max_size=6).filter(any),
    widths=st.tuples(st.integers(0, 40), st.integers(0, 140)),
    seed=st.integers(0, 2**31),
)
def test_random_contexts_and_widths_follow_the_oracle(make_case, arithmetic, contexts, widths, seed):
    kv, times = ARITHMETIC[arithmetic]
    kv = KVConfig(kv.precision, *widths, kv.probability_operand)
    assert make_case(contexts, kv, head_dim=64, group=2, seed=seed).follows_oracle(2 * times, grid=5)


@pytest.mark.parametrize(("s", "w"), [(0, 0), (16, 0), (0, 128), (0, 1), (1, 0), (17, 100), (400, 0), (0, 400)])
def test_any_sink_and_recent_width_follows_the_oracle(make_case, s, w):
    assert make_case(CONTEXTS, KVConfig("kv4rl", s, w)).follows_oracle(1.0)


@arithmetics
@pytest.mark.parametrize("block_tokens", [1, 40, 500])
def test_blocks_of_requests_do_not_matter(make_case, kv, times, block_tokens, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", block_tokens * 2 * 128)
    case = make_case(CONTEXTS, kv)  # written in blocks too
    blocks = reference.request_blocks(case.cache, case.batch.context_tokens)
    rows = [row for block in blocks for row in range(block.start, block.stop)]
    assert len(blocks) > 1 and rows == list(range(len(CONTEXTS)))
    assert case.follows_oracle(times)


def test_without_protection_kv4rl_is_kv4(make_case):
    unprotected, kv4 = (make_case(CONTEXTS, kv).decode() for kv in (KVConfig("kv4rl", 0, 0), KVConfig("kv4")))
    assert torch.equal(unprotected[0], kv4[0]) and torch.equal(unprotected[1], kv4[1])


def test_protection_brings_the_output_nearer_to_the_unquantised_one(make_case):
    exact = make_case([300] * 4, KVConfig("bf16")).oracle()[0]
    loss = {p: (make_case([300] * 4, KVConfig(p)).decode()[0] - exact).norm() for p in ("kv8", "kv4rl", "kv4")}
    assert loss["kv8"] < loss["kv4rl"] < loss["kv4"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@precisions
def test_output_has_the_query_dtype_and_the_normaliser_is_fp32(make_case, precision, dtype):
    case = make_case([100, 300], KVConfig(precision), dtype=dtype)
    out, lse = case.decode()
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.shape == (2, 8, 128) and lse.shape == (2, 8)
    assert case.follows_oracle(1.2)


@precisions
def test_an_empty_context_gives_zero_and_minus_infinity(make_case, precision):
    out, lse = make_case([0, 20, 0], KVConfig(precision)).decode()
    assert (out[[0, 2]] == 0).all() and (lse[[0, 2]] == -torch.inf).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()
    out, lse = make_case([0, 0], KVConfig(precision)).decode()
    assert (out == 0).all() and (lse == -torch.inf).all()


@precisions
def test_a_batch_of_none_gives_none(make_case, precision):
    out, lse = make_case([], KVConfig(precision)).decode()
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


def test_one_token_returns_its_stored_value(make_case):
    """Softmax over one position is 1, so the output is the dequantised value, in the arithmetic of its path."""
    int4 = lambda v: dequantize_affine(quantize_affine(v))
    int8 = lambda v: dequantize_symmetric(quantize_symmetric(v))
    stored = {"bf16": lambda v: v, "kv4": int4, "kv8": int8, "kv4rl": lambda v: int8(v).bfloat16().float()}
    for precision, decoded in stored.items():
        case = make_case([1], KVConfig(precision), group=3)
        expected = decoded(case.v[0][0]).repeat_interleave(3, 0)
        torch.testing.assert_close(case.decode()[0][0], expected, rtol=1e-6, atol=1e-6)


@precisions
def test_other_requests_and_page_order_do_not_matter(make_case, precision):
    together = make_case([300, 17, 145], KVConfig(precision))
    out, lse = together.decode()
    yardstick = together.errors()[1][0]
    for row in range(3):
        rows = slice(row, row + 1)
        batch = DecodeBatch(*(t[rows] for t in (together.batch.page_table, together.batch.context_tokens)),
                            together.batch.slots[rows])  # fmt: skip
        alone, alone_lse = together.cache.decode(together.layer, together.q[rows], batch, return_lse=True)
        assert (alone[0] - out[row]).norm() <= 1e-3 * yardstick * out[row].norm()
        torch.testing.assert_close(alone_lse[0], lse[row])


@precisions
def test_a_shared_prefix_is_read_by_both_requests(make_case, precision):
    case = make_case([40, 40], KVConfig(precision, sink_tokens=4, recent_tokens=4))
    table = case.batch.page_table
    for name in ("k_codes", "v_codes", "k_scale", "v_scale"):
        side = getattr(case.cache.side, name)
        side[:, case.batch.slots[1]] = side[:, case.batch.slots[0]]
    shared = table.clone()
    shared[1] = table[0]
    case.batch = DecodeBatch(shared, case.batch.context_tokens, case.batch.slots)
    case.q[1] = case.q[0]
    out, lse = case.decode()
    assert torch.equal(out[0], out[1]) and torch.equal(lse[0], lse[1])
    assert case.follows_oracle(1.0)


def constant(k, v):
    k[0][5:60], v[0][5:60] = 0.1, -3.3


def zero(k, v):
    k[0].zero_(), v[0].zero_()


def huge_keys(k, v):
    k[0][[3, 100, 250]] *= 1e7


def huge_values(k, v):
    v[0][[3, 100, 250], :, 7] = torch.tensor([1e6, -1e9, 1e30])[:, None]


@arithmetics
@pytest.mark.parametrize("edit", [constant, zero, huge_keys, huge_values])
def test_extreme_vectors_stay_finite_and_follow_the_oracle(make_case, kv, times, edit):
    case = make_case([300, 20], kv, edit=edit)
    out, lse = case.decode()
    assert out.isfinite().all() and lse.isfinite().all()
    if edit is zero:
        assert (out[0] == 0).all()
    elif edit is not huge_keys:  # scores of 1e7 have no FP32 digits left to compare
        assert case.follows_int8_oracle(2 * times)


@precisions
@pytest.mark.parametrize("which", ["key", "value", "query"])
@pytest.mark.parametrize("position", [2, 100, 299])
def test_nan_reaches_its_own_request_and_heads_only(make_case, precision, which, position):
    def edit(k, v):
        if which != "query":
            (k if which == "key" else v)[1][position, 0, 5] = torch.nan

    clean = make_case([300, 300, 300], KVConfig(precision))
    case = make_case([300, 300, 300], KVConfig(precision), edit=edit)
    if which == "query":
        case.q[1, :4, 9] = torch.nan
    out, lse = case.decode()
    expected, expected_lse = clean.decode()
    channels = slice(5, 6) if precision == "bf16" and which == "value" else slice(None)
    assert out[1, :4, channels].isnan().all()
    out[1, :4], lse[1, :4] = expected[1, :4], expected_lse[1, :4]
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@precisions
def test_nan_in_an_unused_page_tail_does_not_reach_the_output(make_case, precision):
    """Nor from unused side entries: the bits are those over zeros in their place."""
    case = make_case([20, 100, 300], KVConfig(precision, 16, 8))
    k, v = case.cache.main.read(case.layer, case.batch.page_table[0, :2])
    for x in (k, v):
        assert x[1, :, 4:].isnan().all() and x[1, :, :4].isfinite().all()
    poisoned = case.decode()
    main, side = case.cache.main, case.cache.side
    view = split_chunk(main.storage, precision, 128, main.dtype)
    numbers = [view.k, view.v, view.k_scale, view.k_offset, view.v_scale, view.v_offset, side.k_scale, side.v_scale]
    for x in numbers:
        if x is not None:
            x.nan_to_num_(0.0)
    assert case.cache.main.read(case.layer, case.batch.page_table[0, 1:2])[0].isfinite().all()
    for clean, ours in zip(case.decode(), poisoned, strict=True):
        assert ours.isfinite().all() and torch.equal(ours, clean)
