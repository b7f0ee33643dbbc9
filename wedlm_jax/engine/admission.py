"""Who gets a place on the device: first come, first served.

The first that waits gets an index as soon as some replica has one, and pages for its text and a
window. Nobody behind it may take these before, whatever is short.

One exception makes shared prompts cheap: whose prefix another sequence is computing right now
waits until that has its prompt, and others may pass meanwhile, but only into room that is left
when its own has been set aside. Nobody waits for the same request twice.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.prefix import Node
from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import SequenceState, widest_span
from wedlm_jax.engine.waiting import Waiting

SHORTEST_REUSE = 32
"""Tokens below which computing them again is as cheap as waiting for them."""


@dataclasses.dataclass(frozen=True)
class AdmissionRound:
    """What came of one look at the queue.

    Attributes:
      admitted: who got an index.
      num_deferred: how many wait for another's prompt.
      pages_are_short: whether somebody waits though an index is free.
    """

    admitted: list[SequenceState]
    num_deferred: int
    pages_are_short: bool


@dataclasses.dataclass
class _Room:
    """What a replica can still give away in this round."""

    replica: Replica
    indices: int
    pages: int
    load: int


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a sequence would go: its replica, the cached pages there, the pages it needs beside
    what it shares, how many tokens it shares, and who still computes them."""

    room: _Room
    nodes: list[Node]
    pages: int
    shared: int
    maker: SequenceState | None


class Admitter:
    """Gives places to those who wait.

    Args:
      replicas: all alike.
      widest: the widest window that a request may get.
    """

    def __init__(self, replicas: Sequence[Replica], widest: Callable[[Request], int]):
        self._replicas, self._widest = replicas, widest

    def admit(self, waiting: Waiting) -> AdmissionRound:
        """Admits as many as there is room for."""
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
        return len(sequence.text) + widest_span(self._widest(sequence.request))

    def _trim(self, rooms: Sequence[_Room]) -> bool:
        """Takes back the pages that were given for forwards to come; whether there were any."""
        trimmed = 0
        for room in rooms:
            if room.indices > 0:
                before = room.replica.num_available
                for sequence in room.replica.running:
                    room.replica.trim(sequence, sequence.room_needed)
                room.pages += room.replica.num_available - before
                trimmed += room.replica.num_available - before
        return trimmed > 0

    def _place(self, sequence: SequenceState, rooms: Sequence[_Room]) -> _Place | None:
        """Where there is room: where most of the text is cached or will soon be, unless that
        replica has far more to do than another; the least loaded of equals."""
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
        """Pages that stay free: each running sequence will want another soon, and who is admitted
        into the last ones is the first to be put back."""
        return room.load

    def _place_in(self, sequence: SequenceState, room: _Room) -> _Place:
        replica = room.replica
        nodes, size = replica.cached(sequence), replica.pages.page_size
        # Cached pages that nobody holds count as available, but not for anything else now.
        unheld = replica.tree.unheld(nodes)
        needed = replica.pages.needed(self._tokens(sequence))
        maker, soon = self._maker(sequence, replica)
        if maker is not None and soon >= len(nodes) * size + max(SHORTEST_REUSE, 1):
            return _Place(room, nodes, needed - soon // size + unheld, soon, maker)
        shared = len(nodes) * size
        return _Place(room, nodes, needed - len(nodes) + unheld, shared, None)

    def _maker(self, sequence: SequenceState, replica: Replica) -> tuple[SequenceState | None, int]:
        """Who computes most of a sequence's text right now, and how many tokens of it, in full
        pages."""
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
        """Whether it has waited for this maker before, who was put back meanwhile."""
        return sequence.waited_for.get(maker.number, maker.num_admissions) != maker.num_admissions


def common_length(one: array[int], other: array[int], limit: int, page_size: int) -> int:
    """How many first tokens, of ``limit`` at most, are the same; 0 where the first page differs."""
    if one[: min(page_size, limit)] != other[: min(page_size, limit)]:
        return 0
    differ = np.frombuffer(one, np.int32, limit) != np.frombuffer(other, np.int32, limit)
    first = int(differ.argmax()) if limit else 0
    return first if limit and differ[first] else limit
