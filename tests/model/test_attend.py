"""Packed and chunked causal attention against float64 attention written out, row by row."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.model.attend import PackedCausal, causal_chunk

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _qkv(rows, query_heads, kv_heads, head_dim=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, query_heads, head_dim), (rows, kv_heads, head_dim), (rows, kv_heads, head_dim))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _written_out(q, k, v):
    """Row i of q over keys up to i + (keys - rows), in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group, skipped = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    out = torch.empty_like(q)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            seen_k, seen_v = (x[: row + skipped + 1, head // group] for x in (k, v))
            out[row, head] = (seen_k @ q[row, head] / q.shape[-1] ** 0.5).softmax(0) @ seen_v
    return out


def _assert_as_close_as_plain_softmax(out, q, k, v):
    """Largest error at most twice that of textbook attention in the same dtype."""
    exact = _written_out(q, k, v)
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ wide_k.transpose(1, 2) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(k.shape[0] - q.shape[0]).logical_not()
    plain = (scores.masked_fill(hidden, -torch.inf).float().softmax(-1).to(q.dtype) @ wide_v).transpose(0, 1)
    # One unit in the last place of slack, for chunks so small that plain softmax errs by nothing.
    bound = 2 * (plain.double() - exact).abs().max() + torch.finfo(q.dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= bound


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40]), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (16, 1)]),
)
def test_packed_rows_see_their_own_sequence_up_to_themselves(lengths, heads):
    q, k, v = _qkv(sum(lengths), *heads)
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    out = PackedCausal(bounds)(0, q, k, v)
    assert out.shape == q.shape
    for start, stop in pairwise(bounds):
        if stop > start:
            part = slice(start, stop)
            _assert_as_close_as_plain_softmax(out[part], q[part], k[part], v[part])


@settings(deadline=None, max_examples=40)
@given(
    start=st.sampled_from([0, 1, 15, 16, 17, 50]),
    rows=st.sampled_from([1, 2, 16, 33]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    head_dim=st.sampled_from([64, 128]),
)
def test_chunk_rows_see_everything_before_the_chunk(start, rows, heads, head_dim):
    q, k, v = _qkv(start + rows, *heads, head_dim=head_dim)
    _assert_as_close_as_plain_softmax(causal_chunk(q[start:], k, v, start), q[start:], k, v)


def test_later_keys_may_hold_anything():
    q, k, v = _qkv(20, 4, 2)
    before = PackedCausal([0, 12, 20])(0, q, k, v)
    k[12:], v[12:] = torch.nan, torch.nan
    assert torch.equal(PackedCausal([0, 12, 20])(0, q, k, v)[:12], before[:12])


def test_gradients_reach_queries_keys_and_values():
    inputs = [x.double().requires_grad_() for x in _qkv(7, 2, 1, head_dim=4)]
    assert torch.autograd.gradcheck(lambda *qkv: PackedCausal([0, 3, 7])(0, *qkv), inputs)


@pytest.mark.parametrize("bounds", [[], [1, 5], [0, 5, 3]])
def test_bounds_out_of_order_are_refused(bounds):
    with pytest.raises(ValueError, match="cu_seqlens="):
        PackedCausal(bounds)


def test_rows_beyond_the_bounds_are_refused():
    with pytest.raises(ValueError, match="rows=6: expected 5, the end of cu_seqlens"):
        PackedCausal([0, 5])(0, *_qkv(6, 2, 1))
    with pytest.raises(ValueError, match="k_all rows=6: expected start"):
        causal_chunk(*_qkv(6, 2, 1), 1)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (16, 1)])
def test_cuda_agrees_with_float64(dtype, heads):
    bounds = [0, 1, 1, 18, 34, 99]
    q, k, v = (x.cuda() for x in _qkv(99, *heads, head_dim=128, dtype=dtype))
    out = PackedCausal(bounds)(0, q, k, v)
    for start, stop in pairwise(bounds):
        if stop > start:
            part = slice(start, stop)
            _assert_as_close_as_plain_softmax(out[part], q[part], k[part], v[part])
    for start in (1, 50, 98):
        _assert_as_close_as_plain_softmax(causal_chunk(q[start:], k, v, start), q[start:], k, v)


@pytest.mark.gpu
@needs_cuda
def test_a_chunk_of_a_long_prefix_writes_no_scores_to_memory():
    q, k, v = (x.cuda() for x in _qkv(8192, 16, 4, head_dim=128, dtype=torch.bfloat16))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    causal_chunk(q[4096:], k, v, 4096)
    assert torch.cuda.max_memory_allocated() - before < 4 * q.nbytes


@pytest.mark.gpu
@needs_cuda
def test_cuda_gradients_are_those_of_float64():
    leaves = [x.cuda().requires_grad_() for x in _qkv(60, 4, 2, head_dim=128, dtype=torch.bfloat16)]
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    pattern = torch.randn(60, 4, 128, generator=torch.Generator().manual_seed(1))
    attend = PackedCausal([0, 23, 60])
    (attend(0, *leaves).float() * pattern.cuda()).sum().backward()
    (attend(0, *exact) * pattern).sum().backward()
    for leaf, reference in zip(leaves, exact, strict=True):
        # BF16 probabilities and gradients: a few roundings of 2^-8 each, relative to the gradient's size.
        assert (leaf.grad.cpu().double() - reference.grad).norm() <= 2**-6 * reference.grad.norm()
