"""Sequences that wait for a place on the device, in the order in which they came."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from wedlm_jax.engine.sequence import SequenceState


class Waiting:
    """A queue in order of arrival. A sequence that was put back gets its old place in it."""

    def __init__(self) -> None:
        # From `_start` on sorted; what was taken out stays here until all before it is out, too.
        self._arrivals: list[int] = []
        self._sequences: dict[int, SequenceState] = {}
        self._start = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        """Yields the sequences, who came first before the others. The one that was yielded last
        may be taken out meanwhile."""
        for place in range(self._start, len(self._arrivals)):
            sequence = self._sequences.get(self._arrivals[place])
            if sequence is not None:
                yield sequence

    def put(self, sequence: SequenceState) -> None:
        """Adds a sequence at the place of its arrival."""
        arrival = sequence.arrival
        if 2 * self._start > len(self._arrivals):
            del self._arrivals[: self._start]
            self._start = 0
        place = bisect.bisect_left(self._arrivals, arrival, self._start)
        if place == len(self._arrivals) or self._arrivals[place] != arrival:
            self._arrivals.insert(place, arrival)
        self._sequences[arrival] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out."""
        del self._sequences[sequence.arrival]
        while (
            self._start < len(self._arrivals) and self._arrivals[self._start] not in self._sequences
        ):
            self._start += 1
