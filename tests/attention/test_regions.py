import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.attention.regions import Regions, main_region, regions, side_entry

CONTEXTS = [0, 1, 15, 16, 17, 127, 128, 143, 144, 145, 160, 161, 1000]


def counts(split: Regions, n: int) -> list[int]:
    """How often each position of [0, n) is counted; one more element for anything outside."""
    seen = [0] * (n + 1)
    for start, stop in split:
        for p in range(start, stop):
            seen[p if 0 <= p < n else n] += 1
    return seen


def each_once(split: Regions, n: int) -> bool:
    return counts(split, n) == [1] * n + [0]


@pytest.mark.parametrize("n", CONTEXTS)
@pytest.mark.parametrize(("s", "w"), [(16, 128), (0, 128), (16, 0), (0, 0), (1, 1), (5, 7), (144, 0), (0, 144)])
def test_each_position_is_in_exactly_one_region(n, s, w):
    split = regions(n, s, w)
    assert each_once(split, n)
    assert split.sink[1] == split.main[0] and split.main[1] == split.recent[0]
    assert split.sink == (0, min(s, n))
    assert split.recent[1] - split.recent[0] == min(w, max(0, n - s))


@settings(deadline=None, max_examples=200)
@given(n=st.integers(0, 600), s=st.integers(0, 200), w=st.integers(0, 300))
def test_each_position_is_in_exactly_one_region_for_any_widths(n, s, w):
    assert each_once(regions(n, s, w), n)
    start, stop = main_region(torch.tensor([n]), s, w)
    assert (start.item(), stop.item()) == regions(n, s, w).main


def window_off_by_one(n, s, w):
    """A mutant: the main region runs one position too far into the recent window."""
    split = regions(n, s, w)
    return split._replace(main=(split.main[0], min(split.main[1] + 1, n)))


def double_counted_sink(n, s, w):
    """A mutant: the main region starts at 0, as if the sink were not protected."""
    return regions(n, s, w)._replace(main=(0, regions(n, s, w).main[1]))


def overlapping_short_context(n, s, w):
    """A mutant: recent is the last w positions even where these are sink."""
    return regions(n, s, w)._replace(recent=(max(0, n - w), n))


@pytest.mark.parametrize("mutant", [window_off_by_one, double_counted_sink, overlapping_short_context])
def test_the_count_catches_mutants(mutant):
    assert not all(each_once(mutant(n, 16, 128), n) for n in CONTEXTS)


@pytest.mark.parametrize(("s", "w"), [(16, 128), (0, 5), (3, 1), (4, 0)])
def test_kept_positions_have_distinct_entries_that_fill_in_order(s, w):
    for n in range(s + 3 * w + 4):
        split = regions(n, s, w)
        kept = [*range(*split.sink), *range(*split.recent)]
        entries = [side_entry(p, s, w) for p in kept]
        assert sorted(entries) == list(range(min(n, s + w)))


def test_without_a_ring_no_later_position_has_an_entry():
    assert [side_entry(p, 2, 0) for p in range(4)] == [0, 1, -1, -1]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((-1, 0, 0), "context_tokens=-1"), ((1, -2, 0), "sink_tokens=-2"), ((1, 0, -3), "recent_tokens=-3")],
)
def test_negative_arguments_are_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=f"{name}: expected an integer >= 0"):
        regions(*arguments)
