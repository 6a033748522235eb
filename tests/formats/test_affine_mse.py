"""A range chosen by its squared error, when a vector is written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.formats.affine import dequantize_affine, quantize_affine, quantize_affine_mse


def squared_error(quantize, x, **settings_):
    return (dequantize_affine(quantize(x, **settings_)) - x).square().sum(-1)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), log_scale=st.floats(-4, 4), group=st.sampled_from([None, 16]))
def test_no_vector_loses_more_than_with_its_full_range(seed, log_scale, group):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) * 10**log_scale
    full, chosen = (squared_error(quantize, x, group=group) for quantize in (quantize_affine, quantize_affine_mse))
    assert (chosen <= full).all()


def test_it_gains_where_one_element_stretches_the_range():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    full, chosen = (squared_error(quantize, x).mean() for quantize in (quantize_affine, quantize_affine_mse))
    assert chosen < 0.95 * full


@pytest.mark.parametrize("constant", [0.0, -3.0, 7.0])
def test_constant_vectors_are_exact(constant):
    x = torch.full((2, 64), constant)
    assert torch.equal(dequantize_affine(quantize_affine_mse(x)), x)


@pytest.mark.parametrize("magnitude", [1e6, torch.inf])
def test_beyond_fp16_everything_stays_finite(magnitude):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    x[:, 5] = magnitude
    assert torch.isfinite(dequantize_affine(quantize_affine_mse(x))).all()


def test_nan_stays_in_its_vector():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    clean = dequantize_affine(quantize_affine_mse(x))
    x[1, 7] = torch.nan
    back = dequantize_affine(quantize_affine_mse(x))
    assert back[1].isnan().all() and torch.equal(back[[0, 2]], clean[[0, 2]])


def test_wrong_settings_are_refused_as_ever():
    with pytest.raises(ValueError, match="group=48"):
        quantize_affine_mse(torch.zeros(2, 128), group=48)
