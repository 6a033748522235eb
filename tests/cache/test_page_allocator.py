import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.cache.page_allocator import OutOfPages, PageAllocator


@settings(deadline=None, max_examples=100)
@given(num_pages=st.integers(0, 20), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40))
def test_every_page_has_one_owner_and_none_is_lost(num_pages, actions):
    allocator = PageAllocator(num_pages)
    owned: list[list[int]] = []
    for allocate, n in actions:
        free_before = allocator.num_free
        if allocate:
            try:
                owned.append(allocator.allocate(n))
            except OutOfPages as error:
                assert n > free_before and (error.wanted, error.free) == (n, free_before)
                assert allocator.num_free == free_before
        elif owned:
            allocator.free(owned.pop(n % len(owned)))
        held = [page for pages in owned for page in pages]
        assert len(held) == len(set(held)) and all(0 <= page < num_pages for page in held)
        assert allocator.num_free == num_pages - len(held)
    for pages in owned:
        allocator.free(pages)
    assert sorted(allocator.allocate(num_pages)) == list(range(num_pages))


def test_running_out_names_both_numbers():
    allocator = PageAllocator(4)
    allocator.allocate(3)
    with pytest.raises(OutOfPages, match="wanted 2, free 1"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_double_free_is_refused_and_changes_nothing():
    allocator = PageAllocator(4)
    first, second = allocator.allocate(2)
    allocator.free([first])
    with pytest.raises(ValueError, match="double free"):
        allocator.free([second, first])
    with pytest.raises(ValueError, match="double free"):
        allocator.free([second, second])
    assert allocator.num_free == 3


@pytest.mark.parametrize("page", [-1, 4, 10**9])
def test_a_foreign_page_is_refused_by_name(page):
    with pytest.raises(ValueError, match=f"page={page}: expected a page of this pool, 0 … 3"):
        PageAllocator(4).free([page])


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="num_pages=-1"):
        PageAllocator(-1)
    with pytest.raises(ValueError, match="pages=-2"):
        PageAllocator(3).allocate(-2)
