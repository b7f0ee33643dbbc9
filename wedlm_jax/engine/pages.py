"""Counts the holders of each page of one cache, and finds prefixes that stay in it."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence

TRASH_PAGE = 0
"""The page that padding is written to; no sequence ever gets it."""


class Pages:
    """Counts the holders of each page of one cache.

    The holders of a page are the sequences that read it, and the prefix tree. It is free when the
    last of them drops it.

    Args:
      num_pages: number of pages, at least 2, the trash page included.
      page_size: tokens per page.

    Raises:
      ValueError: a number is too small.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"expected at least 2 pages of at least 1 token, not {num_pages} of {page_size}"
            )
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """The number of pages that sequences can have."""
        return self.num_pages - 1

    def needed(self, tokens: int) -> int:
        """Returns how many pages it takes to hold this many tokens."""
        return -(-tokens // self.page_size)

    def holders(self, page: int) -> int:
        """Returns how many holders a page has; 0 for a free one."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Takes ``count`` free pages and gives each one holder."""
        if count <= 0:
            return []
        # Callers have counted the pages that are free or can be evicted.
        assert count <= len(self._free), f"{count} pages of {len(self._free)} free ones"
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, page: int) -> None:
        """Adds a holder to a page that is not free."""
        # A free page may be taken, and overwritten, at any time.
        assert self._holders[page], f"page {page} is free"
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """Removes a holder from a page, and frees the page with its last one."""
        # If it were freed twice, two sequences would get it.
        assert self._holders[page], f"page {page} is free already"
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)


# --- Prefixes that stay in the cache ---------------------------------------------------------
#
# The prefix cache is a radix tree over full pages of keys and values.
#
# Each node is a page, and its key is the tokens in it; the path from the root to a node spells the
# text up to the end of its page. The tree is itself one holder of each of its pages. A sequence
# that reads a node's page also holds all nodes above it. So below a page that only the tree holds,
# no page is held by a sequence, and all such pages can be evicted, leaves first.


class Node:
    """A page in the tree. `children` are the pages that continue its text, keyed by tokens."""

    __slots__ = ("children", "key", "last_use", "page", "parent")

    def __init__(self, key: bytes, page: int, parent: Node | None):
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[bytes, Node] = {}
        self.last_use = 0


class PrefixTree:
    """Finds cached pages by their text: full pages whose keys and values are final.

    Args:
      pages: the cache's pages. The tree keeps pages only until they are needed elsewhere: a caller
        that finds none free calls `evict`.
    """

    def __init__(self, pages: Pages):
        self._pages = pages
        self._root = Node(b"", 0, None)
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._entries = 0  # breaks ties, so that the heap never compares nodes
        self.num_pages = 0
        self.num_evictable = 0
        """The number of pages that only the tree holds."""

    def match(self, text: array[int], limit: int) -> list[Node]:
        """Returns the nodes of the longest cached prefix of ``text``, in the order of the text.

        Args:
          limit: maximum tokens of the prefix; only full pages count.
        """
        size, node, found = self._pages.page_size, self._root, []
        for start in range(0, min(limit, len(text)) - size + 1, size):
            child = node.children.get(page_key(text, start, size))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def unheld(self, nodes: Iterable[Node]) -> int:
        """Returns how many of the nodes could be evicted now."""
        return sum(self._pages.holders(node.page) == 1 for node in nodes)

    def hold(self, nodes: Iterable[Node]) -> None:
        """Adds a sequence to the holders of each of the nodes."""
        for node in nodes:
            if self._pages.holders(node.page) == 1:
                self.num_evictable -= 1
            self._pages.share(node.page)

    def let_go(self, nodes: Sequence[Node]) -> None:
        """Removes a sequence from the holders of the nodes on its path, which stay in the tree."""
        self._clock += 1
        for node in nodes:
            node.last_use = self._clock
            self._pages.drop(node.page)
            if self._pages.holders(node.page) == 1:
                self.num_evictable += 1
        if nodes:
            self._offer(nodes[-1])

    def add(self, parent: Node | None, key: bytes, page: int) -> Node:
        """Adds a full page of final keys and values as a child of a node that its sequence holds.

        The sequence then holds the returned node instead of ``page``. If the tree has this text
        already, the node has another page, and ``page`` is dropped.

        Args:
          parent: None for the first page of a text.
        """
        above = parent or self._root
        node = above.children.get(key)
        if node is not None:
            self.hold([node])
            self._pages.drop(page)
            return node
        node = above.children[key] = Node(key, page, above)
        node.last_use = self._clock
        self._pages.share(page)
        self.num_pages += 1
        return node

    def evict(self, count: int) -> int:
        """Frees pages that only the tree holds, the least recently used leaves first.

        Returns:
          how many pages were freed: ``count``, or fewer if no more can be evicted.
        """
        freed = 0
        while freed < count and self._leaves:
            last_use, _, node = heapq.heappop(self._leaves)
            if last_use != node.last_use or not self._is_evictable_leaf(node):
                continue
            assert node.parent is not None
            above, node.parent = node.parent, None
            del above.children[node.key]
            self._pages.drop(node.page)
            self.num_pages -= 1
            self.num_evictable -= 1
            freed += 1
            self._offer(above)
        return freed

    def _is_evictable_leaf(self, node: Node) -> bool:
        there = node.parent is not None and not node.children
        return there and self._pages.holders(node.page) == 1

    def _offer(self, node: Node) -> None:
        """Adds a node to the candidates for eviction if it can be evicted."""
        if self._is_evictable_leaf(node):
            if len(self._leaves) > 2 * self.num_pages + 64:
                self._drop_stale_entries()
            self._entries += 1
            heapq.heappush(self._leaves, (node.last_use, self._entries, node))

    def _drop_stale_entries(self) -> None:
        """Keeps the newest entry of each candidate; without evictions old ones would pile up."""
        newest = {
            id(node): (last_use, entry, node)
            for last_use, entry, node in sorted(self._leaves, key=lambda leaf: leaf[1])
            if last_use == node.last_use and self._is_evictable_leaf(node)
        }
        self._leaves = list(newest.values())
        heapq.heapify(self._leaves)


def page_key(text: array[int], start: int, size: int) -> bytes:
    """Returns the key of the page with the tokens from ``start`` on."""
    return text[start : start + size].tobytes()
