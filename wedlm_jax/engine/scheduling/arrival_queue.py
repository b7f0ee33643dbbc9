"""Sequences that wait for a place on the device, in order of arrival."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from wedlm_jax.engine.scheduling.sequence import SequenceState


class ArrivalQueue:
    """A queue in order of arrival, to which a preempted sequence returns at its old place."""

    def __init__(self) -> None:
        # Sorted from `_start` on. A removed arrival stays here until all before it are removed.
        self._arrivals: list[int] = []
        self._sequences: dict[int, SequenceState] = {}
        self._start = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        """Yields the sequences in order of arrival. The one yielded last may be removed
        meanwhile."""
        for place in range(self._start, len(self._arrivals)):
            sequence = self._sequences.get(self._arrivals[place])
            if sequence is not None:
                yield sequence

    def put(self, sequence: SequenceState) -> None:
        """Inserts a sequence at the place of its arrival."""
        arrival = sequence.arrival
        if 2 * self._start > len(self._arrivals):
            del self._arrivals[: self._start]
            self._start = 0
        place = bisect.bisect_left(self._arrivals, arrival, self._start)
        if place == len(self._arrivals) or self._arrivals[place] != arrival:
            self._arrivals.insert(place, arrival)
        self._sequences[arrival] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """Removes a sequence."""
        del self._sequences[sequence.arrival]
        while (
            self._start < len(self._arrivals) and self._arrivals[self._start] not in self._sequences
        ):
            self._start += 1
