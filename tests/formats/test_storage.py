import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.formats.affine import quantize_affine
from kv4rl.formats.fp4 import quantize_mxfp4, quantize_nvfp4
from kv4rl.formats.packing import chunk_bytes
from kv4rl.formats.storage import bits_per_element, pack_codes, stored_bytes, unpack_codes
from kv4rl.formats.symmetric import quantize_symmetric

X = torch.randn(6, 2, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("q", "bits", "expected"),
    [
        (quantize_affine(X), 4, 4.25),
        (quantize_affine(X, group=64), 4, 4.50),
        (quantize_affine(X, group=32), 4, 5.00),
        (quantize_affine(X, group=16), 4, 6.00),
        (quantize_affine(X, bits=5), 5, 5.25),
        (quantize_nvfp4(X), 4, 4.75),
        (quantize_mxfp4(X), 4, 4.25),
        (quantize_symmetric(X), 8, 8.125),
    ],
)
def test_storage_cost_is_the_papers(q, bits, expected):
    """§D.4 and Fig. A4b,c give 4.25, 5.00, 6.00, 4.75 and 4.25; the others follow the same count."""
    assert bits_per_element(q, bits) == expected


def test_a_page_costs_what_its_vectors_do():
    page = torch.zeros(16, 128)
    assert 2 * stored_bytes(quantize_affine(page), bits=4) == chunk_bytes("kv4", 128)
    assert 2 * stored_bytes(quantize_symmetric(page), bits=8) == chunk_bytes("kv8", 128)


@settings(deadline=None, max_examples=40)
@given(bits=st.integers(1, 8), rows=st.integers(0, 3), eights=st.integers(1, 8), seed=st.integers(0, 2**31))
def test_packed_codes_come_back(bits, rows, eights, seed):
    codes = torch.randint(0, 2**bits, (rows, 8 * eights), generator=torch.Generator().manual_seed(seed)).byte()
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, eights * bits)
    assert torch.equal(unpack_codes(packed, bits), codes)


def test_two_nibbles_fill_a_byte_low_first():
    assert pack_codes(torch.tensor([0x3, 0xA], dtype=torch.uint8), 4).tolist() == [0xA3]


def test_wrong_input_is_refused_by_name():
    with pytest.raises(ValueError, match="bits=9: expected 1 … 8"):
        pack_codes(torch.zeros(8, dtype=torch.uint8), 9)
    with pytest.raises(ValueError, match="code=16: expected below 16"):
        pack_codes(torch.full((8,), 16, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match=r"codes.shape\[-1\]=3"):
        pack_codes(torch.zeros(3, dtype=torch.uint8), 4)
