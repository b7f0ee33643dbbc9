"""Admits waiting sequences to the device: first come, first served.

The first in the queue gets an index as soon as some replica has a free one, and pages for its text
and a window. Until then no later sequence is admitted, so that it cannot starve.

One exception makes shared prompts cheap: a sequence whose prefix another one is computing is
deferred until that prefill is done. Later sequences may overtake it meanwhile, but only into the
room that is left after its room is reserved. A sequence never waits for the same prefill twice.
"""

from __future__ import annotations

import bisect
import dataclasses
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from wedlm_jax.engine.pages import Node
from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import SequenceState, widest_span
from wedlm_jax.engine.windows import WindowChoice

SHORTEST_REUSE = 32
"""The fewest shared tokens to wait for; fewer are computed again as cheaply."""


@dataclasses.dataclass(frozen=True)
class AdmissionRound:
    """The result of one pass over the queue.

    Attributes:
      admitted: sequences that got an index.
      num_deferred: how many sequences wait for another's prefill.
      pages_are_short: whether a sequence waits although an index is free.
    """

    admitted: list[SequenceState]
    num_deferred: int
    pages_are_short: bool


@dataclasses.dataclass
class _Room:
    """What a replica can still give in this round."""

    replica: Replica
    indices: int
    pages: int
    load: int


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A possible place for a sequence.

    Attributes:
      room: its replica.
      nodes: the cached pages of its text there.
      pages: how many pages it needs in addition to shared ones.
      shared: how many of its tokens it shares.
      maker: the sequence that is still computing the shared tokens; None if they are cached.
    """

    room: _Room
    nodes: list[Node]
    pages: int
    shared: int
    maker: SequenceState | None


class Admitter:
    """Gives waiting sequences their places.

    Args:
      replicas: the replicas, all of the same size.
      windows: determines the windows that a request may get.
    """

    def __init__(self, replicas: Sequence[Replica], windows: WindowChoice):
        self._replicas, self._windows = replicas, windows

    def admit(self, waiting: ArrivalQueue) -> AdmissionRound:
        """Admits as many sequences as there is room for."""
        admitted: list[SequenceState] = []
        deferred, short = 0, False
        rooms = self._rooms()
        for sequence in waiting:
            place = self._place(sequence, rooms)
            if place is None and self._trim(rooms):
                place = self._place(sequence, rooms)
            if place is None:
                short = any(room.indices > 0 for room in rooms)
                break
            place.room.indices -= 1
            place.room.pages -= place.pages
            place.room.load += 1
            if place.maker is not None:
                sequence.waited_for[place.maker.number] = place.maker.num_admissions
                deferred += 1
                continue
            waiting.remove(sequence)
            place.room.replica.admit(sequence, place.nodes, self._tokens(sequence))
            admitted.append(sequence)
        return AdmissionRound(admitted, deferred, short)

    def _rooms(self) -> list[_Room]:
        return [
            _Room(
                replica,
                replica.num_free_indices,
                replica.num_available - replica.shortfall(),
                len(replica.running),
            )
            for replica in self._replicas
        ]

    def _tokens(self, sequence: SequenceState) -> int:
        request, windows = sequence.request, self._windows
        span = widest_span(windows.widest(request), windows.lookup(request), sequence.backup_room)
        return len(sequence.text) + span

    def _trim(self, rooms: Sequence[_Room]) -> bool:
        """Takes back pages granted for future forwards; returns whether there were any."""
        trimmed = 0
        for room in rooms:
            if room.indices > 0:
                before = room.replica.num_available
                for sequence in room.replica.running:
                    room.replica.trim(sequence, sequence.room_needed)
                room.pages += room.replica.num_available - before
                trimmed += room.replica.num_available - before
        return trimmed > 0

    def _place(self, sequence: SequenceState, rooms: Sequence[_Room]) -> _Candidate | None:
        """Chooses a replica with room: the one where most of the text is cached or soon will be,
        unless it is far busier than another; among equals, the least loaded. Returns None if no
        replica has room."""
        places = [self._place_in(sequence, room) for room in rooms if room.indices > 0]
        fitting = [
            place
            for place in places
            if place.pages + self._watermark(place.room) <= place.room.pages
        ]
        if not fitting:
            return None
        least = min(place.room.load for place in fitting)
        slack = max(rooms[0].replica.num_sequences // 4, 1)
        return max(
            (place for place in fitting if place.room.load < least + slack),
            key=lambda place: (place.shared, -place.room.load, place.room.pages),
        )

    def _watermark(self, room: _Room) -> int:
        """Returns how many pages must stay free. Each running sequence will soon need another, and
        a sequence admitted into the last pages would be the first to be preempted."""
        return room.load

    def _place_in(self, sequence: SequenceState, room: _Room) -> _Candidate:
        replica = room.replica
        nodes, size = replica.cached(sequence), replica.pages.page_size
        # Cached pages without a holder count as available, but not once this sequence reads them.
        unheld = replica.tree.unheld(nodes)
        needed = replica.pages.needed(self._tokens(sequence))
        maker, soon = self._maker(sequence, replica)
        if maker is not None and soon >= len(nodes) * size + SHORTEST_REUSE:
            return _Candidate(room, nodes, needed - soon // size + unheld, soon, maker)
        shared = len(nodes) * size
        return _Candidate(room, nodes, needed - len(nodes) + unheld, shared, None)

    def _maker(self, sequence: SequenceState, replica: Replica) -> tuple[SequenceState | None, int]:
        """Returns the sequence that is computing the longest prefix of this one's text, and the
        length of the prefix in full pages, in tokens."""
        best, most = None, 0
        size = replica.pages.page_size
        for maker in replica.running if replica.reuse else ():
            if not maker.is_prefilling or self._has_waited(sequence, maker):
                continue
            limit = min(len(sequence.text) - 1, maker.text_length_admitted)
            common = common_length(sequence.text, maker.text, limit, size) // size * size
            if common > most:
                best, most = maker, common
        return best, most

    @staticmethod
    def _has_waited(sequence: SequenceState, maker: SequenceState) -> bool:
        """Returns whether a sequence has waited for a maker that has been preempted since."""
        return sequence.waited_for.get(maker.number, maker.num_admissions) != maker.num_admissions


def common_length(one: array[int], other: array[int], limit: int, page_size: int) -> int:
    """Returns the length of the common prefix, at most ``limit``; 0 if the first page differs."""
    if one[: min(page_size, limit)] != other[: min(page_size, limit)]:
        return 0
    differ = np.frombuffer(one, np.int32, limit) != np.frombuffer(other, np.int32, limit)
    first = int(differ.argmax()) if limit else 0
    return first if limit and differ[first] else limit


# --- The queue -------------------------------------------------------------------------------


class ArrivalQueue:
    """A queue in order of arrival, to which a preempted sequence returns at its old place."""

    def __init__(self) -> None:
        # Sorted from `_start` on. A removed arrival stays in the list until all before it are
        # removed.
        self._arrivals: list[int] = []
        self._sequences: dict[int, SequenceState] = {}
        self._start = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        """Yields the sequences in order of arrival; the last one yielded may be removed."""
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
