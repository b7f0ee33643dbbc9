"""One replica: its places for sequences, its pages, and the prefixes cached in them."""

from __future__ import annotations

import heapq

import numpy as np

from wedlm_jax.engine.pages import Node, Pages, PrefixTree, page_key
from wedlm_jax.engine.sequence import SequenceState


class Replica:
    """Up to N sequences that share one cache.

    Args:
      number: the replica's number; its indices start at ``number * num_sequences``.
      num_sequences: N.
      num_pages, page_size: the size of its cache; see `Pages`.
      table: int32 ``[N, max_pages]``, the page table, which the replica fills in.
    """

    def __init__(
        self,
        number: int,
        *,
        num_sequences: int,
        num_pages: int,
        page_size: int,
        table: np.ndarray,
    ):
        self.number, self.num_sequences = number, num_sequences
        self.pages = Pages(num_pages, page_size)
        self.tree = PrefixTree(self.pages)
        self.running: list[SequenceState] = []
        """The running sequences, in order of arrival."""
        self._table = table
        self._first = number * num_sequences
        self._free_indices = list(range(self._first, self._first + num_sequences))

    @property
    def num_free_indices(self) -> int:
        return len(self._free_indices)

    @property
    def num_available(self) -> int:
        """The number of pages that are free or can be freed without taking any from a sequence."""
        return self.pages.num_free + self.tree.num_evictable

    @property
    def capacity_of_pages(self) -> int:
        """The maximum tokens that a sequence can have if it is alone in the cache."""
        most = min(self.pages.num_usable, self._table.shape[1])
        return most * self.pages.page_size

    def capacity(self, sequence: SequenceState) -> int:
        """Returns how many tokens the pages of a sequence hold."""
        return sequence.num_pages * self.pages.page_size

    def lacks(self, sequence: SequenceState, tokens: int) -> int:
        """Returns how many pages a sequence lacks to hold this many tokens."""
        lacking = self.pages.needed(tokens) - len(sequence.nodes) - len(sequence.own)
        return lacking if lacking > 0 else 0

    def shortfall(self) -> int:
        """Returns how many pages the running sequences lack for their next forward."""
        return sum(self.lacks(sequence, sequence.room_needed) for sequence in self.running)

    # --- prefixes -----------------------------------------------------------------------

    def cached(self, sequence: SequenceState) -> list[Node]:
        """Returns the pages of the longest cached prefix of a waiting sequence's text; never of the
        whole text, since its last token must be computed to predict the next one."""
        return self.tree.match(sequence.text, len(sequence.text) - 1)

    def store(self, sequence: SequenceState) -> None:
        """Moves a sequence's pages that are full of final keys and values into the tree. If the
        tree has their text already, the sequence continues with the tree's pages."""
        size, place = self.pages.page_size, len(sequence.nodes)
        for _ in range(sequence.num_computed // size - place):
            page, above = sequence.own.pop(0), sequence.nodes[-1] if sequence.nodes else None
            node = self.tree.add(above, page_key(sequence.text, place * size, size), page)
            sequence.nodes.append(node)
            self._row(sequence)[place] = node.page
            place += 1

    # --- places and pages of sequences -----------------------------------------------------

    def admit(self, sequence: SequenceState, nodes: list[Node], tokens: int) -> None:
        """Gives a sequence an index, and pages that hold ``tokens`` tokens.

        Args:
          nodes: from `cached`.
        """
        self.tree.hold(nodes)
        sequence.index = heapq.heappop(self._free_indices)
        sequence.nodes, sequence.own = list(nodes), []
        sequence.num_computed = len(nodes) * self.pages.page_size
        sequence.text_length_admitted = len(sequence.text)
        sequence.num_admissions += 1
        self._row(sequence)[: len(nodes)] = [node.page for node in nodes]
        self.running.append(sequence)
        self.running.sort(key=lambda one: one.arrival)
        self.grow(sequence, tokens)

    def grow(self, sequence: SequenceState, tokens: int) -> None:
        """Gives a sequence the pages that it lacks to hold ``tokens`` tokens; may evict prefixes.
        The caller has checked that there are enough."""
        count = self.lacks(sequence, tokens)
        if not count:
            return
        if count > self.pages.num_free:
            self.tree.evict(count - self.pages.num_free)
        start = sequence.num_pages
        new = self.pages.take(count)
        self._row(sequence)[start : start + count] = new
        sequence.own += new

    def trim(self, sequence: SequenceState, tokens: int) -> None:
        """Takes back the pages that a sequence does not need to hold ``tokens`` tokens."""
        keep = max(self.pages.needed(tokens) - len(sequence.nodes), 0)
        surplus = sequence.own[keep:]
        if surplus:
            del sequence.own[keep:]
            self._row(sequence)[sequence.num_pages :] = 0
            for page in surplus:
                self.pages.drop(page)

    def remove(self, sequence: SequenceState) -> int:
        """Takes back a sequence's index and pages; returns the index. Its prefix stays cached."""
        index = sequence.index
        self._row(sequence)[:] = 0
        for page in sequence.own:
            self.pages.drop(page)
        self.tree.let_go(sequence.nodes)
        sequence.nodes, sequence.own = [], []
        sequence.index, sequence.num_computed = -1, 0
        self.running.remove(sequence)
        heapq.heappush(self._free_indices, index)
        return index

    def _row(self, sequence: SequenceState) -> np.ndarray:
        return self._table[sequence.index - self._first]
