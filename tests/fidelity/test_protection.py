"""Masks of protected positions: the cache's regions, and the two controls."""

import pytest
import torch

from kv4rl.attention.regions import regions
from kv4rl.fidelity.protection import attention_mask, random_mask, region_mask
from kv4rl.fidelity.representation import Protection

CONTEXTS = torch.arange(5, 30)
COLUMNS = 29


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (4, 0), (0, 7), (4, 7), (20, 20), (64, 512)])
def test_regions_are_those_of_the_cache(sink, recent):
    mask = region_mask(Protection(sink=sink, recent=recent), CONTEXTS, COLUMNS)
    for row, n in zip(mask, CONTEXTS.tolist(), strict=True):
        split = regions(n, sink, recent)
        protected = {*range(*split.sink), *range(*split.recent)}
        assert set(row.nonzero()[:, 0].tolist()) == protected


def test_random_positions_are_as_many_as_asked_seen_and_the_same_again():
    protection = Protection(select="random", count=8)
    mask = random_mask(protection, CONTEXTS, COLUMNS, seed=1)
    assert mask.sum(-1).tolist() == [min(8, n) for n in CONTEXTS.tolist()]
    assert not any(row[n:].any() for row, n in zip(mask, CONTEXTS.tolist(), strict=True))
    assert torch.equal(mask, random_mask(protection, CONTEXTS, COLUMNS, seed=1))
    assert not torch.equal(mask, random_mask(protection, CONTEXTS, COLUMNS, seed=2))


def test_a_position_that_lost_its_random_place_does_not_get_it_back():
    mask = random_mask(Protection(select="random", count=8), CONTEXTS, COLUMNS, seed=3)
    for position in range(COLUMNS):
        seen = mask[position < CONTEXTS, position].int()
        assert (seen.diff() <= 0).all()


def test_attention_keeps_the_positions_of_most_mass_so_far():
    """Two heads share a KV head; the prompt's queries gave position 1 a lead that position 3 overtakes later."""
    p = torch.zeros(1, 2, 3, 6)
    p[0, 0, :, 3], p[0, 1, :, 0] = 0.75, 0.25
    earlier = torch.tensor([[0.1, 1.0, 0.1]])
    mask = attention_mask(Protection(select="attention", count=1), p, earlier, torch.tensor([4, 5, 6]))
    assert mask.shape == (1, 1, 3, 6)
    assert mask[0, 0].nonzero().tolist() == [[0, 1], [1, 3], [2, 3]]
