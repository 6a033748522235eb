"""FP4 against tables written out from the OCP specifications, not against the code's own constants."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.formats.fp4 import (
    decode_e2m1,
    dequantize_mxfp4,
    dequantize_nvfp4,
    encode_e2m1,
    quantize_mxfp4,
    quantize_nvfp4,
)

FORMATS = {"nvfp4": (quantize_nvfp4, dequantize_nvfp4, 16), "mxfp4": (quantize_mxfp4, dequantize_mxfp4, 32)}


@pytest.fixture(params=FORMATS)
def fmt(request):
    return FORMATS[request.param]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def from_bits(code, exponent_bits, mantissa_bits, bias):
    """A small float's value by the definition of its fields: sign, exponent, mantissa; exact."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = Fraction(code & (2**mantissa_bits - 1), 2**mantissa_bits)
    if exponent == 0:
        return sign * mantissa * Fraction(2) ** (1 - bias)
    return sign * (1 + mantissa) * Fraction(2) ** (exponent - bias)


def test_all_sixteen_e2m1_codes_decode_by_their_fields_and_encode_back():
    codes = torch.arange(16, dtype=torch.uint8)
    values = decode_e2m1(codes)
    assert values.tolist() == [float(from_bits(code, 2, 1, 1)) for code in range(16)]
    assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP MX 1.0, table 5
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(encode_e2m1(values), codes)


def test_e2m1_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest():
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for tie, code in ties.items():
        point = torch.tensor(tie)
        below, above = torch.nextafter(point, torch.tensor(0.0)), torch.nextafter(point, torch.tensor(9.0))
        lower = next(c for c in range(7) if decode_e2m1(torch.tensor(c + 1)) > tie)
        assert encode_e2m1(torch.stack((point, below, above))).tolist() == [code, lower, lower + 1]
        assert encode_e2m1(-point).item() == code + 8


def test_e2m1_saturates_and_keeps_no_nan():
    assert encode_e2m1(torch.tensor([5.1, 6.0, 7.0, 1e30, torch.inf])).tolist() == [7] * 5
    assert encode_e2m1(-torch.tensor([5.1, 6.0, 7.0, 1e30, torch.inf])).tolist() == [15] * 5
    assert encode_e2m1(torch.tensor([torch.nan, -torch.nan])).tolist() == [0, 0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=50))
def test_e2m1_is_the_nearest_code(values):
    x = torch.tensor(values)
    distance = (decode_e2m1(torch.arange(16)).double() - x.double()[:, None]).abs()
    assert torch.equal((decode_e2m1(encode_e2m1(x)).double() - x.double()).abs(), distance.amin(-1))


def test_every_e4m3_scale_decodes_by_its_fields():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    nan = {0x7F, 0xFF}  # OCP OFP8 E4M3: no infinities, one NaN per sign
    assert set(values.isnan().nonzero()[:, 0].tolist()) == nan
    expected = [float(from_bits(code, 4, 3, 7)) for code in range(256) if code not in nan]
    assert values[~values.isnan()].tolist() == expected
    assert max(expected) == 448


def test_nvfp4_reaches_every_positive_e4m3_scale():
    """A block of 6 x s under a global scale of 1 has the scale s, and decodes exactly."""
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.cat((torch.full((len(scales), 16), 2688.0), (6 * scales)[:, None].expand(-1, 16)), -1)
    q = quantize_nvfp4(x)
    assert (q.global_scale == 1).all()
    assert torch.equal(q.scale.float()[:, 1], scales)
    assert torch.equal(dequantize_nvfp4(q), x)


def test_nvfp4_rounds_scales_to_nearest_even():
    wanted = torch.tensor([1.0625, 1.1875, 1.0626, 440.0, 432.1])  # spacing 1/8 above 1, 32 above 256
    x = torch.cat((torch.full((5, 16), 2688.0), (6 * wanted)[:, None].expand(-1, 16)), -1)
    assert quantize_nvfp4(x).scale.float()[:, 1].tolist() == [1.0, 1.25, 1.125, 448.0, 448.0]


def test_every_e8m0_scale_decodes_by_its_exponent():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e8m0fnu).float()
    assert values[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert values[255].isnan()


def test_mxfp4_takes_every_e8m0_scale_that_fp32_magnitudes_reach():
    """The largest magnitude 2^e gets the scale 2^(e - 2), clamped below at 2^-127; FP32 ends at e = 127."""
    exponents = range(-149, 128)
    x = torch.tensor([math.ldexp(1.0, e) for e in exponents])[:, None].expand(-1, 32)
    q = quantize_mxfp4(x)
    assert q.scale.view(torch.uint8)[:, 0].tolist() == [max(0, e - 2 + 127) for e in exponents]
    exact = torch.tensor([e >= -125 for e in exponents])
    assert torch.equal(dequantize_mxfp4(q)[exact], x[exact])


@pytest.mark.parametrize(("largest", "scale"), [(4.0, 1), (7.99, 1), (8.0, 2), (3.99, 0.5), (1.0, 0.25)])
def test_mxfp4_scale_is_the_power_of_two_of_ocp(largest, scale):
    x = torch.zeros(32)
    x[5] = -largest
    assert quantize_mxfp4(x).scale.float().item() == scale


def test_mxfp4_saturates_above_six_scales_as_ocp_says():
    assert (dequantize_mxfp4(quantize_mxfp4(torch.full((2, 32), 7.0))) == 6.0).all()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), log_scale=st.floats(-6, 6), name=st.sampled_from(sorted(FORMATS)))
def test_codes_are_nearest_against_the_stored_scales(seed, log_scale, name):
    quantize, dequantize, block = FORMATS[name]
    x = gaussian(3, 2, 128, seed=seed) * 10**log_scale
    q = quantize(x)
    step = q.scale.double() * (q.global_scale.double().unsqueeze(-1) if name == "nvfp4" else 1.0)
    grid = (decode_e2m1(torch.arange(16)).double() * step.unsqueeze(-1)).repeat_interleave(block, -2)
    best = (grid - x.double().unsqueeze(-1)).abs().amin(-1)
    chosen = (dequantize(q).double() - x.double()).abs()
    assert (chosen <= best + 1e-6 * x.abs().amax()).all()  # the product of two FP32 scales is rounded once


def test_zero_vectors_are_exact_and_constants_nearly(fmt):
    quantize, dequantize, _ = fmt
    assert torch.equal(dequantize(quantize(torch.zeros(2, 128))), torch.zeros(2, 128))
    for constant in (3.0, -0.75, 2.0**-20, 6.0):  # elements E2M1 can hold times a power of two
        decoded = dequantize(quantize(torch.full((2, 128), constant)))
        assert (decoded / constant - 1).abs().max() <= 2**-22  # NVFP4's global scale c / 2688 is rounded in FP32


def test_infinities_saturate(fmt):
    quantize, dequantize, _ = fmt
    x = gaussian(3, 64)
    x[0, 3], x[1, 40], x[2] = torch.inf, -torch.inf, torch.inf
    decoded = dequantize(quantize(x))
    assert decoded.isfinite().all()
    assert decoded[0, 3] > 1e38 and decoded[1, 40] < -1e38 and (decoded[2] > 1e38).all()


def test_nan_reaches_its_vector_or_block_only(fmt):
    quantize, dequantize, block = fmt
    x = gaussian(3, 2, 128)
    clean = dequantize(quantize(x))
    x[1, 0, 70] = torch.nan
    q = quantize(x)
    decoded = dequantize(q)
    # NVFP4's global scale is the vector's, MXFP4's scale the block's.
    hit = slice(0, 128) if block == 16 else slice(64, 96)
    assert decoded[1, 0, hit].isnan().all() and (q.codes[1, 0, hit] == 0).all()
    decoded[1, 0, hit] = clean[1, 0, hit]
    assert torch.equal(decoded, clean)


def test_blocks_of_mxfp4_are_on_their_own():
    x = gaussian(5, 128)
    alone = torch.cat([dequantize_mxfp4(quantize_mxfp4(part)) for part in x.split(32, -1)], -1)
    assert torch.equal(dequantize_mxfp4(quantize_mxfp4(x)), alone)


def test_finer_scales_lose_less():
    x = gaussian(64, 128)
    loss = {name: (dequantize(quantize(x)) - x).square().mean() for name, (quantize, dequantize, _) in FORMATS.items()}
    assert loss["nvfp4"] < loss["mxfp4"]


def test_empty_input_keeps_its_shape(fmt):
    quantize, dequantize, _ = fmt
    assert dequantize(quantize(torch.empty(0, 2, 128))).shape == (0, 2, 128)


def test_wrong_input_is_refused_by_name(fmt):
    quantize, _, block = fmt
    with pytest.raises(ValueError, match=rf"x.shape\[-1\]=40: expected a multiple of the block of {block} elements"):
        quantize(torch.zeros(2, 40))
    with pytest.raises(ValueError, match=r"x.dtype=torch.int64: expected a floating dtype"):
        quantize(torch.zeros(2, 128, dtype=torch.int64))
