"""Vectors and scores of unusual size: zero, constant and huge ones, late maxima, value scales that grow."""

import pytest
import torch

from kv4rl.attention.float64 import oracle
from kv4rl.config import KVConfig

pytestmark = pytest.mark.gpu
QUANTISED = ("kv8", "kv4", "kv4rl")


@pytest.mark.parametrize("spread", [1e-4, 1.0, 3e3])
@pytest.mark.parametrize("precision", QUANTISED)
def test_value_magnitude_does_not_matter(make_case, precision, spread):
    """P's FP16 operand keeps its normal range whatever the values' scale: no overflow, no lost tail."""
    scaled = make_case(KVConfig(precision), [1, 300, 3000], dtype=torch.float32, spread=spread)
    generator = torch.Generator(device="cuda").manual_seed(5)
    scaled.q = torch.randn(scaled.q.shape, generator=generator, device="cuda") / spread
    out, _ = scaled.decode()
    exact, _ = oracle(scaled.cache, 1, scaled.q, scaled.batch, query="int8")
    assert (out.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("precision", QUANTISED)
def test_zero_constant_and_huge_vectors_decode_as_near_as_others(make_case, zero_constant_and_huge, precision):
    lengths = [200, 200, 200, 200, 3000]
    make_case(KVConfig(precision), lengths, dtype=torch.float32, edit=zero_constant_and_huge).check()


@pytest.mark.parametrize("precision", QUANTISED)
def test_value_scales_may_grow_in_later_tiles(make_case, precision):
    def edit(row, q, k, v):
        v[200:] *= 1000

    make_case(KVConfig(precision), [2000, 1999], dtype=torch.float32, edit=edit).check()


@pytest.mark.parametrize("precision", QUANTISED)
def test_maximum_may_rise_in_the_last_tile(make_case, precision):
    kv = KVConfig(precision, sink_tokens=2, recent_tokens=3)

    def edit(row, q, k, v):
        k[-1 - kv.recent_tokens * (precision == "kv4rl"), 0] = 40 * q[0]  # the last of the main pages

    make_case(kv, [2000, 1999], dtype=torch.float32, edit=edit).check()
