import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.attention.live_pages import live_pages, segment_max, segment_sum
from kv4rl.attention.regions import main_region, regions


@settings(deadline=None, max_examples=100)
@given(contexts=st.lists(st.integers(0, 200), max_size=6), s=st.integers(0, 40), w=st.integers(0, 70))
def test_valid_places_are_the_main_region_once_and_no_dead_page_is_read(contexts, s, w):
    table = torch.randperm(max(1, len(contexts)) * 13)[: len(contexts) * 13].view(len(contexts), 13)
    pages = live_pages(table, *main_region(torch.tensor(contexts, dtype=torch.int64), s, w))
    assert pages.valid.any(-1).all()
    found = [(row, page, offset) for (row, page), valid in zip(
        zip(pages.rows.tolist(), pages.page_ids.tolist(), strict=True), pages.valid, strict=True)
        for offset in valid.nonzero()[:, 0].tolist()]  # fmt: skip
    expected = [
        (row, int(table[row, p // 16]), p % 16) for row, n in enumerate(contexts) for p in range(*regions(n, s, w).main)
    ]
    assert found == expected


def test_tiles_are_four_pages_at_absolute_positions():
    table = torch.arange(18).view(2, 9)
    pages = live_pages(table, torch.tensor([16, 0]), torch.tensor([140, 30]))
    assert pages.page_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert pages.tiles.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 3, 3]


def test_segments_reduce_and_leave_empty_ones_neutral():
    values = torch.tensor([[1.0, 5.0], [3.0, 4.0], [2.0, torch.nan]])
    segments = torch.tensor([2, 2, 0])
    assert segment_sum(values[:, :1], segments, 3).flatten().tolist() == [2.0, 0.0, 4.0]
    largest = segment_max(values, segments, 3)
    assert largest[2].tolist() == [3.0, 5.0] and (largest[1] == -torch.inf).all() and largest[0, 1].isnan()
