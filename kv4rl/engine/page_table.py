"""Which pages each request slot holds, as arrays that a step reads without a loop over requests."""

import numpy as np

from kv4rl.config import PAGE_TOKENS

NEVER = 1 << 62  # end of a response whose length is not known before it is sampled


class PageTable:
    """Per slot: page ids in order of position, pages held, context tokens, its bound, and the last token.

    `ids` int64 [slots, width], -1 where no page is held; `held`, `context`, `cap`, `last_token` int64 [slots].
    `context` counts every known token of a decoding request, the one that the next step writes included; at `cap`
    of them the response is complete, whatever was sampled. The width follows
    the longest request seen, so that a large pool with short requests stays cheap. `drain` tells which pages were
    handed out since it was last asked: what a copy on a device has to follow.
    """

    def __init__(self, num_slots: int):
        self.ids = np.full((num_slots, 8), -1, dtype=np.int64)
        self.held = np.zeros(num_slots, dtype=np.int64)
        self.context = np.zeros(num_slots, dtype=np.int64)
        self.cap = np.zeros(num_slots, dtype=np.int64)
        self.last_token = np.zeros(num_slots, dtype=np.int64)
        self._given: list[tuple[np.ndarray, np.ndarray]] | None = None  # places, recorded from the first drain on

    def set(self, slot: int, pages: list[int]) -> None:
        """Give an empty slot its first pages."""
        self._widen(len(pages))
        self.ids[slot, : len(pages)] = pages
        self.held[slot] = len(pages)
        if self._given is not None:
            columns = np.arange(len(pages))
            self._given.append((np.full_like(columns, slot), columns))

    def append(self, slots: np.ndarray, pages: list[int]) -> None:
        """Add one page to each of `slots` (distinct)."""
        self._widen(int(self.held[slots].max()) + 1)
        self.ids[slots, self.held[slots]] = pages
        if self._given is not None:
            self._given.append((slots, self.held[slots]))
        self.held[slots] += 1

    def clear(self, slot: int) -> list[int]:
        """Empty a slot and return the pages it held."""
        pages = self.ids[slot, : self.held[slot]].tolist()
        self.ids[slot] = -1
        self.held[slot] = self.context[slot] = self.cap[slot] = self.last_token[slot] = 0
        return pages

    def drain(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(slots, columns, page ids), int64 [n] each, of every place written since the last call, as it is now.

        The first call returns all that is held.
        """
        given, self._given = self._given, []
        if given is None:
            slots, columns = np.nonzero(np.arange(self.ids.shape[1]) < self.held[:, None])
            return slots, columns, self.ids[slots, columns]
        width = self.ids.shape[1]
        places = [slots * width + columns for slots, columns in given]
        place = np.unique(np.concatenate(places)) if places else np.empty(0, dtype=np.int64)
        return place // width, place % width, self.ids.reshape(-1)[place]

    def short_of_page(self, slots: np.ndarray) -> np.ndarray:
        """Those of `slots` whose context has outgrown their pages (by one token)."""
        return slots[self.held[slots] * PAGE_TOKENS < self.context[slots]]

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """Compact page ids int64 [len(slots), most pages held by any of them]."""
        return self.ids[slots, : int(self.held[slots].max(initial=0))]

    def _widen(self, width: int) -> None:
        have = self.ids.shape[1]
        if width > have:
            grown = np.full((len(self.ids), max(width, 2 * have)), -1, dtype=np.int64)
            grown[:, :have] = self.ids
            self.ids = grown
