"""The replay's quantised products on a GPU against their own dequantised weights in FP64."""

import pytest
import torch

from kv4rl.bench.weight_arms import INT4_GROUP, int4_product, scaled_product

pytestmark = pytest.mark.gpu
ROUNDINGS = 2**-6  # relative: of products, sums and outputs to BF16; an H200 had 2^-6.7


@pytest.fixture
def operands():
    generator = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(n, 512, generator=generator, device="cuda").bfloat16() for n in (256, 48)]


def test_w4a16_multiplies_by_its_dequantised_weights(operands):
    """Four-bit weights err by a tenth: codes or scales in another order than the kernel's would show at once."""
    weight, x = operands
    groups = weight.double().view(256, -1, INT4_GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round()
    rounded_scale, middle = scale.bfloat16().double(), (low + 8 * scale).bfloat16().double()
    dequantised = ((codes - 8) * rounded_scale + middle).flatten(1)
    out, exact = int4_product(weight)(x).double(), x.double() @ dequantised.t()
    assert (out - exact).norm() <= ROUNDINGS * exact.norm()
    whole = x.double() @ weight.double().t()
    assert 0.02 * whole.norm() <= (out - whole).norm() <= 0.2 * whole.norm()


def test_w8a8_is_within_e4m3_rounding(operands):
    weight, x = operands
    exact = x.double() @ weight.double().t()
    # Two operands rounded to four significant bits: each errs by 2^-4 of its size at most.
    assert (scaled_product(weight)(x).double() - exact).norm() <= 2 * 2**-4 * exact.norm()
