import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.formats.affine import FP16_MAX, dequantize_affine, quantize_affine


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def is_nearest_code(x, q):
    """Every code decodes to the point of its vector's grid that lies nearest to x (ties may go either way)."""
    levels = torch.arange(16, dtype=torch.float64)
    grid = q.scale.double() * levels + q.offset.double()
    chosen = (q.scale.double() * q.codes.double() + q.offset.double() - x.double()).abs()
    best = (grid[..., None, :] - x.double()[..., None]).abs().amin(-1)
    return bool((chosen <= best * (1 + 1e-5) + 1e-12).all())


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    d=st.sampled_from([64, 128, 256]),
    log_scale=st.floats(-3, 3),
    offset=st.floats(-100, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_codes_are_nearest_against_the_fp16_metadata(seed, d, log_scale, offset, dtype):
    x = (gaussian(4, 2, d, seed=seed) * 10**log_scale + offset).to(dtype)
    q = quantize_affine(x)
    assert (q.codes.dtype, q.scale.dtype, q.offset.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert q.codes.shape == x.shape and q.scale.shape == q.offset.shape == (4, 2, 1)
    assert q.codes.max() <= 15
    assert is_nearest_code(x, q)


def test_the_nearest_check_notices_codes_rounded_against_fp32_metadata():
    x = gaussian(64, 128) + 50  # FP16's spacing at 50 is far from zero against the step
    q = quantize_affine(x)
    low, high = x.aminmax(dim=-1, keepdim=True)
    unrounded = ((x - low) / ((high - low) / 15)).round().to(torch.uint8)
    assert is_nearest_code(x, q)
    assert not is_nearest_code(x, q._replace(codes=unrounded))


def test_error_is_half_a_step_plus_what_fp16_metadata_loses():
    x = gaussian(100, 128)
    q = quantize_affine(x)
    step = q.scale.float()
    metadata_loss = 15 * step * 2**-11 + q.offset.float().abs() * 2**-11
    assert ((dequantize_affine(q) - x).abs() <= 0.5 * step + metadata_loss + 1e-6).all()


def test_extremes_are_codes_0_and_15():
    q = quantize_affine(torch.linspace(-1, 1, 128))
    assert (q.codes[0], q.codes[-1]) == (0, 15)
    assert (q.scale.item(), q.offset.item()) == (torch.tensor(2 / 15).half().item(), -1.0)


@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, 0.1, -1234.567, 65504.0, 1e-8])
def test_a_constant_vector_decodes_to_its_fp16_value(constant):
    q = quantize_affine(torch.full((2, 128), constant))
    assert (q.scale == 0).all() and (q.codes == 0).all()
    assert torch.equal(dequantize_affine(q), torch.full((2, 128), constant).half().float())


@pytest.mark.parametrize("magnitude", [7e4, 1e6, 1e30, 3.4e38, torch.inf])
def test_beyond_fp16_the_metadata_saturates_and_everything_stays_finite(magnitude):
    x = gaussian(4, 64)
    x[0, 3], x[1, 5], x[2] = magnitude, -magnitude, magnitude
    q = quantize_affine(x)
    decoded = dequantize_affine(q)
    assert decoded.isfinite().all()
    assert q.offset.abs().max() <= FP16_MAX and q.scale.max() <= FP16_MAX
    assert decoded[0, 3] >= FP16_MAX and decoded[1, 5] == -FP16_MAX and (decoded[2] == FP16_MAX).all()
    assert torch.equal(decoded[3], dequantize_affine(quantize_affine(x[3])))


def test_nan_stays_in_its_vector():
    x = gaussian(3, 2, 128)
    clean = dequantize_affine(quantize_affine(x))
    x[1, 0, 77] = torch.nan
    q = quantize_affine(x)
    decoded = dequantize_affine(q)
    assert decoded[1, 0].isnan().all() and (q.codes[1, 0] == 0).all()
    decoded[1, 0] = clean[1, 0]
    assert torch.equal(decoded, clean)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_groups_are_quantised_on_their_own(group):
    x = gaussian(5, 128)
    q = quantize_affine(x, group=group)
    assert q.scale.shape == (5, 128 // group)
    alone = torch.cat([dequantize_affine(quantize_affine(part)) for part in x.split(group, -1)], -1)
    assert torch.equal(dequantize_affine(q), alone)


def test_more_bits_and_finer_groups_lose_less():
    x = gaussian(64, 128)
    loss = lambda **how: (dequantize_affine(quantize_affine(x, **how)) - x).square().mean()
    assert loss(bits=8) < loss(bits=5) < loss(bits=4) < loss(bits=3) < loss(bits=2)
    assert loss(group=16) < loss(group=64) < loss()


def test_empty_input_keeps_its_shape():
    q = quantize_affine(torch.empty(0, 2, 128))
    assert dequantize_affine(q).shape == (0, 2, 128)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"bits": 0}, "bits=0: expected 1 … 8"),
        ({"bits": 9}, "bits=9"),
        ({"group": 48}, "group=48: expected a divisor of the last dimension, 128"),
        ({"group": 0}, "group=0"),
    ],
)
def test_wrong_settings_are_refused_by_name(how, message):
    with pytest.raises(ValueError, match=message):
        quantize_affine(gaussian(2, 128), **how)


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"x.dtype=torch.int64: expected a floating dtype"):
        quantize_affine(torch.zeros(2, 128, dtype=torch.int64))
