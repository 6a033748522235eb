import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.formats.symmetric import dequantize_symmetric, quantize_symmetric


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    d=st.sampled_from([64, 128, 256]),
    log_scale=st.floats(-2, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_codes_are_nearest_against_the_fp16_scale(seed, d, log_scale, dtype):
    x = (gaussian(4, 2, d, seed=seed) * 10**log_scale).to(dtype)
    q = quantize_symmetric(x)
    assert (q.codes.dtype, q.scale.dtype) == (torch.int8, torch.float16)
    assert q.codes.shape == x.shape and q.scale.shape == (4, 2)
    assert q.codes.abs().max() <= 127
    step = q.scale.double().unsqueeze(-1)
    error = (step * q.codes.double() - x.double()).abs()
    clipped = q.codes.abs() == 127  # the FP16 scale may have been rounded down: then the largest may fall outside
    assert (error <= step * (0.5 + 1e-5) + clipped * step * 127 * 2**-11).all()


def test_negation_negates_the_codes():
    x = gaussian(10, 128)
    plus, minus = quantize_symmetric(x), quantize_symmetric(-x)
    assert torch.equal(plus.codes, -minus.codes) and torch.equal(plus.scale, minus.scale)


def test_zero_vector_has_scale_zero_and_decodes_to_zero():
    q = quantize_symmetric(torch.zeros(3, 128))
    assert (q.scale == 0).all() and (dequantize_symmetric(q) == 0).all()


@pytest.mark.parametrize("magnitude", [1e7, 1e30, 3.4e38, torch.inf])
def test_beyond_fp16_the_scale_saturates_and_everything_stays_finite(magnitude):
    x = gaussian(2, 64)
    x[0, 3], x[0, 4] = magnitude, -magnitude
    decoded = dequantize_symmetric(quantize_symmetric(x))
    assert decoded.isfinite().all()
    assert decoded[0, 3] == -decoded[0, 4] and decoded[0, 3] >= min(magnitude, 127 * 65504.0) * (1 - 1e-3)


def test_nan_stays_in_its_vector():
    x = gaussian(3, 2, 128)
    clean = dequantize_symmetric(quantize_symmetric(x))
    x[1, 0, 77] = torch.nan
    q = quantize_symmetric(x)
    decoded = dequantize_symmetric(q)
    assert decoded[1, 0].isnan().all() and (q.codes[1, 0] == 0).all()
    decoded[1, 0] = clean[1, 0]
    assert torch.equal(decoded, clean)


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"x.dtype=torch.int8: expected a floating dtype"):
        quantize_symmetric(torch.zeros(2, 128, dtype=torch.int8))
