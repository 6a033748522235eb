"""The free list of 16-token pages (§A.2 "Scheduling and attention")."""

from collections.abc import Iterable

from kv4rl.config import require


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for; the caller decides whether to wait or to preempt."""

    def __init__(self, wanted: int, free: int):
        super().__init__(f"out of KV pages: wanted {wanted}, free {free}")
        self.wanted = wanted
        self.free = free


class PageAllocator:
    """Hands out page ids 0 … num_pages - 1, each to one owner at a time.

    Freed pages are reused last-in first-out, so that a small working set stays small.
    """

    def __init__(self, num_pages: int):
        require(num_pages >= 0, "num_pages", num_pages, "an integer >= 0")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages, all or none. Raises `OutOfPages` (with `.wanted` and `.free`), or `ValueError` for n < 0."""
        require(n >= 0, "pages", n, "an integer >= 0")
        if n > len(self._free):
            raise OutOfPages(n, len(self._free))
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back, all or none. Raises `ValueError` for a page that is not of this pool or not in use."""
        pages = list(pages)
        for page in pages:
            require(0 <= page < self.num_pages, "page", page, f"a page of this pool, 0 … {self.num_pages - 1}")
            require(not self._is_free[page], "page", page, "a page in use (double free)")
        require(len(set(pages)) == len(pages), "pages", pages, "each page once (double free)")
        for page in pages:
            self._is_free[page] = True
        self._free.extend(reversed(pages))
