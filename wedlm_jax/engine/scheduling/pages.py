"""Reference counts of the pages of one cache."""

from __future__ import annotations

from collections.abc import Mapping

TRASH_PAGE = 0
"""Padding is written here; no sequence ever gets it."""


class PageError(RuntimeError):
    """The page counts are inconsistent: a bug of this program, never the fault of its input."""


class Pages:
    """Counts the holders of each page of one cache.

    The holders of a page are the sequences that read it, and the prefix tree. It is free when the
    last of them drops it.

    Args:
      num_pages: at least 2, the trash page included.
      page_size: tokens a page holds.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"pages: {num_pages} of {page_size} tokens hold nothing")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All pages that sequences can have."""
        return self.num_pages - 1

    def needed(self, tokens: int) -> int:
        """Returns how many pages hold so many tokens."""
        return -(-tokens // self.page_size)

    def holders(self, page: int) -> int:
        """Returns how many holders a page has; 0 for a free one."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Takes free pages, each with one holder.

        Raises:
          PageError: fewer are free.
        """
        if count <= 0:
            return []
        if count > len(self._free):
            raise PageError(f"{count} pages were asked for, {len(self._free)} are free")
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, page: int) -> None:
        """Adds a holder to a page that is not free.

        Raises:
          PageError: it is free.
        """
        if self._holders[page] < 1:
            raise PageError(f"page {page} is free and cannot be shared")
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """Removes a holder from a page, and frees the page with its last one.

        Raises:
          PageError: it is free already.
        """
        if self._holders[page] < 1:
            raise PageError(f"page {page} is freed twice")
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def check(self, holders: Mapping[int, int]) -> None:
        """Checks the counts against the real holders.

        Args:
          holders: the number of holders of each page that has any.

        Raises:
          PageError: a page has leaked, has an uncounted holder, or is both free and held.
        """
        for page in range(self.num_pages):
            counted, there = self._holders[page], holders.get(page, 0)
            if counted != there:
                raise PageError(f"page {page} has {there} holders, and {counted} are counted")
        free = set(self._free)
        held = {page for page, count in holders.items() if count}
        everything = set(range(TRASH_PAGE + 1, self.num_pages))
        if len(free) != len(self._free) or free & held or free | held != everything:
            raise PageError("free and held pages do not make up all pages, each once")
