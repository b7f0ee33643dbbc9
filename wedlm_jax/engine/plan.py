"""Plans a step: which waiting sequences are admitted, how many forwards the burst runs, the pages
that its sequences get, and how prompts are computed in it.

A long burst saves round trips to the host; a short one admits waiting requests and notices stop
strings sooner.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from wedlm_jax.engine.pages import Node
from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import SequenceState, widest_span
from wedlm_jax.engine.windows import WindowChoice

WAITING_FORWARDS = 32
"""Maximum forwards of a burst while a sequence waits for a place; it also ends when some places are
free."""
PREFILL_FORWARDS = 8
"""Maximum forwards of a burst while a long prompt is computed chunk by chunk."""
SHORT_OF_PAGES_FORWARDS = 8
"""Maximum forwards of a burst while a sequence waits only for pages, so that running ones get few
pages in advance."""
WATCHED_FORWARDS = 16
"""Maximum forwards of a burst while a stop string, which only the host sees, may end a sequence."""


@dataclasses.dataclass(frozen=True)
class BurstLength:
    """When a burst ends: each replica stops after ``forwards`` forwards, or once ``until_finished``
    (by replica) of its sequences have finished."""

    forwards: int
    until_finished: list[int]


def burst_length(
    running: Sequence[Sequence[SequenceState]],
    *,
    longest: int,
    prefill_forwards: int,
    chunks: Chunks,
    num_waiting: int,
    num_deferred: int,
    pages_are_short: bool,
    soon: bool = False,
) -> BurstLength:
    """Decides when the next burst ends.

    Args:
      running: the running sequences of each replica.
      longest: maximum forwards if no sequence waits.
      prefill_forwards: forwards until all prompts are computed; 0 if they are paused.
      chunks: the prompt chunks of the burst.
      num_waiting, num_deferred: how many sequences wait, and how many of these wait for another's
        prompt.
      pages_are_short: whether some wait for pages although an index is free.
      soon: whether callers want to hear of finished sequences soon, to submit others.
    """
    everybody = [sequence for some in running for sequence in some]
    forwards, until = longest, [len(some) for some in running]
    if any(sequence.request.params.stop for sequence in everybody):
        forwards = min(forwards, WATCHED_FORWARDS)
    if any(sequence.request.params.grammar for sequence in everybody):
        forwards = 1  # the host computes what a grammar allows after each forward
    if num_waiting or soon:
        # New sequences enter only after a share of the running ones has finished, so that their
        # prompts share forwards.
        until = [max(count // (4 if soon else 8), 1) for count in until]
    if num_waiting:
        forwards = min(forwards, WAITING_FORWARDS)
    if pages_are_short:
        forwards = min(forwards, SHORT_OF_PAGES_FORWARDS)
    if chunks.forwards is not None:
        forwards = min(forwards, chunks.forwards)
    if not chunks.tokens:
        until = [1] * len(until)  # if all the others finished, nothing would be left to run
    elif num_deferred:
        forwards = min(forwards, max(prefill_forwards, 1))
    if prefill_forwards > 1:
        forwards = min(forwards, PREFILL_FORWARDS)
    if any(sequence.request.traced for sequence in everybody):
        forwards = 1
    return BurstLength(forwards, until)


def prefill_forwards(replica: Replica, chunk_tokens: int) -> int:
    """Returns how many forwards a replica's prompts still take; 0 if they are paused."""
    if not chunk_tokens:
        return 0
    left = sum(
        sequence.text_length_admitted - sequence.num_computed
        for sequence in replica.running
        if sequence.is_prefilling
    )
    return -(-left // chunk_tokens)


def give_pages(replica: Replica, forwards: int) -> int:
    """Gives every sequence pages for the forwards of a burst, or for fewer forwards if pages are
    short. The caller ensures that there are enough for the next forward.

    Returns:
      how many forwards the pages will probably last.
    """
    sequences = [
        (sequence, sequence.room_needed, expected_rate(sequence), sequence.longest_room)
        for sequence in replica.running
    ]
    while True:
        rooms = [
            (one, max(room, min(one.room_expected(rate, forwards - 1), longest)))
            for one, room, rate, longest in sequences
        ]
        lacking = sum(replica.lacks(one, room) for one, room in rooms)
        if forwards == 1 or lacking <= replica.num_available:
            break
        forwards //= 2
        for one, room, rate, _ in sequences:
            replica.trim(one, max(room, one.room_expected(rate, forwards - 1)))
    for one, room in rooms:
        replica.grow(one, room)
    return forwards


def expected_rate(sequence: SequenceState) -> float:
    """Returns a generous estimate of the tokens that a forward commits."""
    drafts = max(sequence.window, sequence.lookup)
    if drafts == 0:
        return 1.0
    if sequence.num_forwards < 4:
        return 1 + drafts / 4
    return 1.25 * sequence.num_output / sequence.num_forwards


# --- The pace of a long prompt ---------------------------------------------------------------
#
# A long prompt is paced so that sequences that decode at the same time are slowed by a factor of at
# most two.
#
# A chunk of a few tokens adds little to the matrix products. But each of its tokens attends to
# everything before it: after 16k tokens even a small chunk can take as long as tens of decode
# forwards. So time is shared: after a forward with a chunk that took longer than two without, the
# prompt pauses for as many forwards as bring the average down to two.

SHARE = 2.0
"""The factor by which a long prompt may slow forwards down, on average."""
PLAIN_FORWARDS = 8
"""Forwards of the first burst after a long prompt arrives; it runs without chunks, to measure such
forwards."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How prompts are computed in a burst.

    Attributes:
      tokens: maximum prompt tokens per forward, in addition to windows; 0 pauses prompts.
      forwards: maximum forwards of the burst; None if chunks do not limit it.
    """

    tokens: int
    forwards: int | None = None


class PromptPace:
    """Chooses the chunks of each burst.

    Args:
      most: maximum prompt tokens per forward while no long prompt slows others down.
      balanced: the size of a forward that takes about twice as long as a forward of one token.
    """

    def __init__(self, most: int, balanced: int):
        self._most, self._balanced = most, balanced
        self._forget()

    def _forget(self) -> None:
        self._plain: float | None = None
        """Seconds of a forward without a chunk; None until measured."""
        self._pause = float(PLAIN_FORWARDS)
        """How many forwards without chunks come next; the fraction is kept for the next pause."""
        self._is_dear = True
        """Whether the last forward with a chunk took more than its share."""
        self.is_paced = False
        """Whether a long prompt is computed while other sequences decode."""

    def next_chunks(self, replicas: Sequence[Replica]) -> Chunks:
        """Returns the chunks of the next burst.

        Chunks have the maximum size, unless a longer prompt is computed while other sequences
        decode. Then their matrix products may roughly double the time of a forward; if attention
        makes it longer still, they alternate with forwards without chunks.
        """
        budget = chunk_tokens(replicas, self._most, self._balanced)
        if budget is None:
            self._forget()
            return Chunks(self._most)
        self.is_paced = True
        if self._pause > 0:
            return Chunks(0, math.ceil(self._pause))
        return Chunks(budget, 1 if self._is_dear else None)

    def observe(self, tokens: int, forwards: int, seconds: float) -> None:
        """Learns from a burst.

        Args:
          tokens: `Chunks.tokens` of its plan; 0 if it had no chunks.
          forwards: how many forwards it ran.
          seconds: how long it took, including the host's work.
        """
        if not self.is_paced or not forwards:
            return
        if not tokens:
            self._plain, self._pause = seconds / forwards, max(self._pause - forwards, -1.0)
        elif self._plain is not None:  # otherwise it was planned before there was a long prompt
            beyond = seconds / self._plain - SHARE * forwards
            self._is_dear = beyond > 0
            # Each forward without a chunk pays back SHARE - 1 of its own length. Of what is saved
            # while chunks are cheap, no more than one forward counts later.
            self._pause = max(self._pause + beyond / (SHARE - 1), -1.0)


def chunk_tokens(replicas: Sequence[Replica], most: int, balanced: int) -> int | None:
    """Returns how many prompt tokens a forward may compute before its matrix products take more
    than about twice as long; None unless a prompt of more than ``most`` tokens is computed while
    other sequences decode.

    Args:
      balanced: the size of a forward that takes about twice as long as a forward of one token.
    """
    budget = None
    for replica in replicas:
        prefilling = [one for one in replica.running if one.is_prefilling]
        # Sequences at the end of their prompt do not count, since a paused one may lack the last
        # token.
        others_decode = any(o.num_computed >= o.text_length_admitted for o in replica.running)
        if others_decode and any(_is_long(one, most) for one in prefilling):
            slots = sum(1 + one.window for one in replica.running)
            limit = min(max(balanced - slots, slots), most)
            budget = limit if budget is None else min(budget, limit)
    return budget


def _is_long(sequence: SequenceState, most: int) -> bool:
    return sequence.text_length_admitted - max(sequence.num_cached_tokens, 0) > most


# --- Admission -------------------------------------------------------------------------------
#
# Sequences are admitted first come, first served. The first in the queue gets an index as soon as
# some replica has a free one, and pages for its text and a window. Until then no later sequence is
# admitted, so that the first cannot starve.
#
# One exception makes shared prompts cheap: a sequence whose prefix another one is computing is
# deferred until that prefill is done. Meanwhile later sequences may overtake it, but its room stays
# reserved. A sequence never waits for the same prefill twice.

SHORTEST_REUSE = 32
"""Minimum number of shared tokens worth waiting for; recomputing fewer is just as cheap."""


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
        a sequence that was given the last pages would be the first to be preempted."""
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
        for maker in replica.running:
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
