"""The P operand: one dynamic scale per query and absolute 64-token tile, so rounding never depends on the rest."""

import pytest
import torch

from kv4rl.attention.live_pages import live_pages
from kv4rl.attention.reference import rounded_weights
from kv4rl.config import KVConfig

operands = pytest.mark.parametrize("operand", ["fp16", "u8"])


def pages_of(*contexts):
    contexts = torch.tensor(contexts)
    table = torch.arange(len(contexts) * 40).view(len(contexts), 40)
    return live_pages(table, torch.zeros_like(contexts), contexts)


def weights_of(pages, seed=0):
    shape = (len(pages.rows), 2, 3, 16)
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return weights.masked_fill(~pages.valid[:, None, None], 0.0)


def static_scale(weights, pages, operand):
    """A mutant: 255 steps under the request's largest weight, as with the running maximum of a flash kernel."""
    return (weights / weights.max() * 255).round() * (weights.max() / 255)


@operands
def test_error_is_half_a_step_under_the_tile_maximum(operand):
    pages = pages_of(300, 17)
    weights = weights_of(pages)
    error = (rounded_weights(weights, pages, operand) - weights).abs()
    step = {"fp16": 2**-11, "u8": 1 / 255}[operand]
    assert (error <= 0.5001 * step).all() and error.max() > 0.1 * step


@operands
def test_a_tile_does_not_notice_another_tile_or_request(operand):
    pages = pages_of(300, 90)
    weights = weights_of(pages)
    before = rounded_weights(weights, pages, operand)
    changed = weights.clone()
    changed[5] *= 1e6  # page 5 of request 0: tile 1, pages 4 … 7
    after = rounded_weights(changed, pages, operand)
    same = [page for page in range(len(pages.rows)) if not 4 <= page < 8]
    assert torch.equal(before[same], after[same])
    if operand == "u8":
        assert not torch.equal(before[4], after[4])


def keeps_the_tail(rounding, operand):
    """A peaked sink, then a flat tail of 1,984 weights of 1/2000 of it: is the tail's total kept to 1 %?"""
    pages = live_pages(torch.arange(128)[None], torch.tensor([0]), torch.tensor([2048]))
    weights = torch.full((128, 1, 1, 16), 1 / 2000)
    weights[0, 0, 0, 0] = 1.0
    tail = rounding(weights, pages, operand)[4:].sum()
    return bool((tail - weights[4:].sum()).abs() < 0.01 * weights[4:].sum())


@operands
def test_a_flat_tail_behind_a_peaked_sink_keeps_its_probability(operand):
    assert keeps_the_tail(rounded_weights, operand)
    assert not keeps_the_tail(static_scale, operand)


@operands
def test_zero_and_tiny_tiles_round_without_harm(operand):
    pages = pages_of(130)
    weights = weights_of(pages)
    weights[:4] = 0.0
    weights[4:8] *= 1e-30
    rounded = rounded_weights(weights, pages, operand)
    assert (rounded[:4] == 0).all()
    assert ((rounded[4:8] - weights[4:8]).abs() <= 1e-30 / 255).all()


def test_nan_stays_in_its_tile_and_query():
    pages = pages_of(200)
    weights = weights_of(pages)
    expected = rounded_weights(weights, pages, "u8")
    weights[6, 1, 2, 3] = torch.nan
    rounded = rounded_weights(weights, pages, "u8")
    assert rounded[4:8, 1, 2].isnan().all()
    rounded[4:8, 1, 2] = expected[4:8, 1, 2]
    assert torch.equal(rounded, expected)


def test_eight_bit_probabilities_err_more_than_fp16(make_case):
    error = {p: make_case([300] * 4, KVConfig("kv4", probability_operand=p)).errors()[0][0] for p in ("fp16", "u8")}
    assert error["u8"] > 4 * error["fp16"]
