"""What an arm stores, counted in bytes, and the values that it refuses."""

import pytest
import torch

from kv4rl.cache.main_cache import MainCache
from kv4rl.cache.side_buffer import SideBuffer
from kv4rl.config import KVConfig
from kv4rl.fidelity.representation import Protection, Representation

SIZES = {"num_layers": 1, "kv_heads": 1, "device": "cpu"}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_bytes_are_those_the_cache_allocates(precision, head_dim):
    kv = KVConfig(precision, 4, 8)
    arm = Representation.of(kv)
    page = MainCache(kv, num_pages=1, head_dim=head_dim, dtype=torch.float32, **SIZES)
    assert 16 * arm.position_bytes(head_dim) == page.nbytes
    side = SideBuffer(kv, num_slots=1, head_dim=head_dim, **SIZES)
    assert arm.protection.positions * arm.protected_bytes(head_dim) == side.nbytes


@pytest.mark.parametrize(
    ("form", "bits"),
    [("int4", 4.25), ("int4_g32", 5.0), ("int4_g16", 6.0), ("nvfp4", 4.75), ("mxfp4", 4.25), ("int5", 5.25)],
)
def test_bits_are_the_papers_at_head_dim_128(form, bits):
    assert Representation(form, form, arithmetic="storage").bits_per_element(128) == bits


def test_a_range_chosen_by_its_error_costs_no_bit():
    assert Representation("int4_mse", "int4_mse").bits_per_element(128) == 4.25


def test_unquantised_is_sixteen_bits():
    assert Representation.of(KVConfig("bf16")).bits_per_element(128) == 16


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Protection(select="best"), "select='best'"),
        (lambda: Protection(sink=-1), "sink=-1"),
        (lambda: Protection(select="random", sink=4), "widths of the other selection=4"),
        (lambda: Protection(count=4), "widths of the other selection=4"),
        (lambda: Protection(form="fp8"), "form='fp8'"),
        (lambda: Representation("int3"), "format='int3'"),
        (lambda: Representation("int4", ""), "keys, values"),
        (lambda: Representation(rotated="q"), "rotated='q'"),
        (lambda: Representation(rotated="kv"), "rotated='kv'"),
        (lambda: Representation(arithmetic="float"), "arithmetic='float'"),
        (lambda: Representation(probability_operand="fp8"), "probability_operand='fp8'"),
    ],
)
def test_wrong_values_are_refused_by_name(make, field):
    with pytest.raises(ValueError, match=field):
        make()
