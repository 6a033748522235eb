import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.attention.merge import merge_state


def attend(scores, v):
    """Softmax attention and its natural log-normaliser; an empty region is (0, -inf)."""
    if scores.shape[-1] == 0:
        return v.new_zeros(*scores.shape[:-1], v.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def data(n, seed=0, spread=5.0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 4, n, generator=generator, dtype=torch.float64) * spread
    return scores, torch.randn(3, n, 8, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=50)
@given(n=st.integers(0, 40), cut=st.integers(0, 40), seed=st.integers(0, 1000))
def test_merging_two_parts_equals_one_pass(n, cut, seed):
    cut = min(cut, n)
    scores, v = data(n, seed)
    o, z = merge_state(*attend(scores[..., :cut], v[:, :cut]), *attend(scores[..., cut:], v[:, cut:]))
    whole_o, whole_z = attend(scores, v)
    torch.testing.assert_close(o, whole_o)
    torch.testing.assert_close(z, whole_z)


def test_order_and_grouping_do_not_matter():
    scores, v = data(30)
    parts = [attend(scores[..., a:b], v[:, a:b]) for a, b in ((0, 7), (7, 19), (19, 30))]
    left = merge_state(*merge_state(*parts[0], *parts[1]), *parts[2])
    right = merge_state(*parts[2], *merge_state(*parts[1], *parts[0]))
    torch.testing.assert_close(left, right)


def test_two_empty_states_give_zero_and_minus_infinity():
    o, z = merge_state(*(torch.full((2, 8), torch.nan), torch.full((2,), -torch.inf)) * 2)
    assert (o == 0).all() and (z == -torch.inf).all()


@pytest.mark.parametrize("garbage", [0.0, torch.nan, torch.inf])
def test_one_empty_side_gives_the_other_bit_for_bit(garbage):
    scores, v = data(9)
    o, z = (t.float() for t in attend(scores, v))
    empty = (torch.full_like(o, garbage), torch.full_like(z, -torch.inf))
    for merged_o, merged_z in (merge_state(o, z, *empty), merge_state(*empty, o, z)):
        assert torch.equal(merged_o, o) and torch.equal(merged_z, z)


def test_far_apart_normalisers_neither_overflow_nor_vanish():
    o_a, o_b = torch.ones(1, 4), torch.full((1, 4), 2.0)
    o, z = merge_state(o_a, torch.tensor([1000.0]), o_b, torch.tensor([-1000.0]))
    assert torch.equal(o, o_a) and z == 1000.0


def test_a_base_two_normaliser_is_noticed():
    scores, v = data(30)
    (o_a, z_a), (o_b, z_b) = attend(scores[..., :9], v[:, :9]), attend(scores[..., 9:], v[:, 9:])
    o, _ = merge_state(o_a, z_a * 1.4427, o_b, z_b)
    assert not torch.allclose(o, attend(scores, v)[0])


def test_nan_of_a_region_that_is_not_empty_is_kept():
    o, _ = merge_state(torch.full((1, 4), torch.nan), torch.zeros(1), torch.ones(1, 4), torch.zeros(1))
    assert o.isnan().all()


def test_mismatched_shapes_are_refused_by_name():
    o, z = torch.zeros(2, 4), torch.zeros(2)
    with pytest.raises(ValueError, match=r"z_b.shape=\(3,\): expected \(2,\)"):
        merge_state(o, z, o, torch.zeros(3))
    with pytest.raises(ValueError, match=r"o_b\.shape"):
        merge_state(o, z, torch.zeros(2, 5), z)
