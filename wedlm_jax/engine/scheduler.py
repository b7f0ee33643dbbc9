"""Schedules sequences: a step admits waiting ones, runs a burst of forwards, and returns events."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from wedlm_jax.engine.interface import (
    Admission,
    Burst,
    Counters,
    Event,
    Failed,
    Finished,
    ForwardRunner,
    Report,
    Request,
    TokenDelta,
    Traced,
)
from wedlm_jax.engine.plan import (
    AdmissionRound,
    Admitter,
    ArrivalQueue,
    PromptPace,
    burst_length,
    give_pages,
    prefill_forwards,
)
from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import Member, SequenceState, longest_room
from wedlm_jax.engine.settings import SchedulerSizes
from wedlm_jax.engine.windows import WindowChoice
from wedlm_jax.errors import InputError, counted

SOON_FORWARDS = 64
"""Maximum forwards of a burst with a time limit."""


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A burst that the device runs.

    Attributes:
      ticket: the ticket for its report.
      members: the sequences that it was planned for.
      planned_ahead: whether it was planned while another was in flight.
    """

    ticket: Any
    burst: Burst
    members: list[Member]
    planned_ahead: bool


class Scheduler:
    """Decodes requests on a device, first come, first served.

    After the device has raised an exception, the scheduler is unusable.

    Args:
      device: runs the forwards.
      sizes: sizes of the device.
      windows: chooses the windows.
    """

    def __init__(self, device: ForwardRunner, sizes: SchedulerSizes, windows: WindowChoice):
        self._device, self._sizes, self._windows = device, sizes, windows
        count = sizes.sequences_each
        self._table = np.zeros((sizes.replicas * count, sizes.max_pages), np.int32)
        self._replicas = [
            Replica(
                number,
                num_sequences=count,
                num_pages=sizes.num_pages,
                page_size=sizes.page_size,
                table=self._table[number * count : (number + 1) * count],
            )
            for number in range(sizes.replicas)
        ]
        self._pace = PromptPace(sizes.chunk_tokens, sizes.balanced_tokens)
        self._admitter = Admitter(self._replicas, windows)
        self._waiting = ArrivalQueue()
        self._sequences: dict[int, SequenceState] = {}
        self._refused: list[Event] = []
        self._arrivals = itertools.count()
        self._released: list[int] = []
        self._prefix_tokens = self._prompt_tokens = 0
        self._preemptions = 0
        self._progress = self._pages_are_short = False
        self._flight: _Flight | None = None
        self._seconds: collections.deque[float] = collections.deque(maxlen=8)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or its refusal has not been reported yet."""
        return bool(self._sequences or self._refused)

    @property
    def sequences(self) -> Collection[SequenceState]:
        """All waiting and running sequences."""
        return self._sequences.values()

    @property
    def is_running(self) -> bool:
        """Whether any sequence has a place on the device."""
        return any(replica.running for replica in self._replicas)

    def check(self, request: Request) -> None:
        """Refuses a request that could not be decoded even if it were alone.

        Raises:
          InputError: it has no tokens or no seed, or it exceeds the model's length or the cache.
        """
        length, most = len(request.prompt), request.params.max_tokens
        if request.params.seed is None:
            raise InputError("seed: expected a number; only `LLM` draws one")
        if not length:
            raise InputError("the prompt has no tokens; at least one is needed")
        if length + most > self._sizes.max_text:
            raise InputError(
                f"a prompt of {counted(length, 'token')} and max_tokens {most} exceed "
                f"max_model_len {self._sizes.max_text}"
            )
        if most > self.most_tokens(request):
            raise InputError(
                f"a prompt of {counted(length, 'token')} and max_tokens {most} need a cache of "
                f"{self._room(request)} tokens, window included, but it has "
                f"{self._replicas[0].capacity_of_pages}"
            )

    def most_tokens(self, request: Request) -> int:
        """Returns the largest ``max_tokens`` that a request's prompt leaves room for."""
        spare = self._replicas[0].capacity_of_pages - self._room(request)
        context = self._sizes.max_text - len(request.prompt)
        return min(context, request.params.max_tokens + spare)

    def _room(self, request: Request) -> int:
        window, lookup = self._windows.widest(request), self._windows.lookup(request)
        return longest_room(request, window, lookup, self._sizes.backup_room)

    def step(
        self,
        submitted: Sequence[Request] = (),
        aborted: Sequence[int] = (),
        *,
        max_forwards: int | None = None,
        seconds: float | None = None,
        ahead: bool = False,
    ) -> list[Event]:
        """Takes requests in, submits a burst, and returns the events of the last one.

        Args:
          submitted: new requests, in order of arrival.
          aborted: numbers of requests to abort, possibly submitted in this step. Their pages are
            freed at once, and they cause no more events. Unknown numbers are ignored.
          max_forwards: maximum forwards of the burst, for callers that need an answer soon; the
            burst then also ends once a quarter of each replica's sequences have finished. By
            default the scheduler chooses. 0 admits requests and runs nothing.
          seconds: longest time that a request arriving now should wait; this also limits the burst.
          ahead: let the burst run while the caller handles events, so that the device does not wait
            for the host: the step submits a burst and returns the events of the one before. Without
            it, or if the next burst depends on this one's result, the step returns the events of
            its own burst.

        Raises:
          ValueError: a request with this number is running or waiting already.
        """
        self.submit(submitted)
        self.abort(aborted)
        events, self._refused = self._refused, []
        if self._flight is not None and not (ahead and self._can_plan_ahead()):
            events += self._land()
        if seconds is not None:
            # A request that arrives now waits for this burst and for the one in flight.
            seconds /= 2 if self._flight is not None else 1
            max_forwards = max(1, min(SOON_FORWARDS, int(seconds / self._forward_seconds(seconds))))
        burst = self._plan(max_forwards, events)
        if burst is not None:
            before = self._flight
            self._flight = self._submit(burst, planned_ahead=before is not None)
            if before is not None:
                events += self._take_report(before)
        if self._flight is not None and not (ahead and self._can_plan_ahead()):
            events += self._land()
        return events

    # --- bursts in flight -------------------------------------------------------------------

    def _submit(self, burst: Burst, *, planned_ahead: bool) -> _Flight:
        running = self._running
        for sequence in running:
            sequence.forwards_in_flight = burst.max_forwards
            sequence.capacity_in_flight = int(burst.capacity[sequence.index])
        members = [Member(one, one.index, one.num_admissions) for one in running]
        burst = dataclasses.replace(burst, members=members)
        return _Flight(self._device.submit(burst), burst, members, planned_ahead)

    def _can_plan_ahead(self) -> bool:
        """Returns whether the next burst may be planned before the result of the one in flight is
        known. It may not if sequences wait for places, since places that become free would stay
        empty for a whole burst; if the pace of a long prompt depends on the result; or if the
        burst in flight will probably finish everything."""
        running, chunk = self._running, self._sizes.chunk_tokens
        prompts = max(prefill_forwards(replica, chunk) for replica in self._replicas)
        places = sum(replica.num_free_indices for replica in self._replicas)
        return (
            len(self._waiting) <= places
            and not self._pages_are_short
            and not self._pace.is_paced
            and any(one.outlasts_flight(prompts) for one in running)
        )

    def _lacks_pages(self) -> bool:
        return any(replica.shortfall() > replica.num_available for replica in self._replicas)

    def _land(self) -> list[Event]:
        """Waits for the burst in flight and returns its events."""
        flight, self._flight = self._flight, None
        assert flight is not None
        events = self._take_report(flight)
        for sequence in self._running:
            sequence.forwards_in_flight = sequence.capacity_in_flight = 0
        return events

    def _take_report(self, flight: _Flight) -> list[Event]:
        report, burst = self._device.collect(flight.ticket), flight.burst
        running = [member.sequence for member in flight.members]
        # The program that records forwards is slower than the others, so its times are not used.
        exact = report.timed and not report.traced
        self._windows.observe(running, burst, report, report.seconds if exact else None)
        self._pace.observe(burst.chunk_tokens, report.num_run, report.seconds)
        if report.num_run:
            self._seconds.append(report.seconds / report.num_run)
        events = list(self._collect(report, flight.members))
        if not (self._progress or flight.planned_ahead or burst.max_forwards == 0):
            raise RuntimeError("a burst of forwards advanced no sequence")
        return events

    def _forward_seconds(self, unknown: float) -> float:
        """Returns the recent mean of the seconds of a forward; ``unknown`` before the first."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else unknown

    def forget_prefixes(self) -> None:
        """Frees the cached prefixes, which are useless with other weights.

        Raises:
          RuntimeError: sequences are running or waiting.
        """
        if self.has_work:
            raise RuntimeError("prefixes can be dropped only while no request runs or waits")
        for replica in self._replicas:
            replica.tree.evict(replica.tree.num_pages)

    # --- requests in and out --------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests in, in order of arrival; the next step reports refused ones as failed.

        Raises:
          ValueError: a request with this number is running or waiting already.
        """
        for request in requests:
            if request.number in self._sequences:
                raise ValueError(f"request {request.number} is running or waiting already")
            try:
                self.check(request)
            except InputError as error:
                self._refused.append(Failed(request, error))
                continue
            room = self._sizes.backup_room
            sequence = SequenceState(request, next(self._arrivals), backup_room=room)
            self._sequences[request.number] = sequence
            self._waiting.put(sequence)

    def abort(self, numbers: Collection[int]) -> None:
        """Ends requests; unknown ones are ignored."""
        if not numbers:
            return
        self._refused = [event for event in self._refused if event.number not in numbers]
        for number in numbers:
            sequence = self._sequences.pop(number, None)
            if sequence is None:
                continue
            if sequence.index < 0:
                self._waiting.remove(sequence)
            else:
                self._released.append(self._replica_of(sequence).remove(sequence))

    @property
    def requests(self) -> list[Request]:
        """The requests of all sequences."""
        return [sequence.request for sequence in self._sequences.values()]

    @property
    def numbers(self) -> list[int]:
        """The numbers of all requests."""
        return list(self._sequences)

    def _replica_of(self, sequence: SequenceState) -> Replica:
        return self._replicas[sequence.index // self._sizes.sequences_each]

    @property
    def _running(self) -> list[SequenceState]:
        return [sequence for replica in self._replicas for sequence in replica.running]

    # --- planning a burst -------------------------------------------------------------------

    def _plan(self, max_forwards: int | None, events: list[Event]) -> Burst | None:
        """Plans the next burst; None if there is nothing to do.

        Args:
          events: if pages have to be taken from sequences, the burst in flight must end first; its
            events are appended here.
        """
        turn = self._admitter.admit(self._waiting)
        self._pages_are_short = turn.pages_are_short
        for sequence in turn.admitted:
            sequence.window = self._windows.widest(sequence.request)
            sequence.lookup = self._windows.lookup(sequence.request)
        running = self._running
        if not running:
            return None
        for sequence, window in zip(running, self._windows.choose(running), strict=True):
            sequence.window = window
        fresh = list(turn.admitted)
        if self._flight is not None and self._lacks_pages():
            events += self._land()
            if not self._running:  # the burst in flight finished all sequences
                return None
        for replica in self._replicas:
            self._secure(replica, fresh)
        admissions = [self._admission(sequence) for sequence in fresh]
        return self._burst(turn, admissions, max_forwards)

    def _secure(self, replica: Replica, fresh: list[SequenceState]) -> None:
        """Ensures that there are enough pages for every sequence's next forward, preempting the
        youngest sequences if necessary.

        Args:
          fresh: sequences that the device does not know yet; preempted ones are removed from it.
        """
        if replica.shortfall() > replica.num_available:
            for sequence in replica.running:
                replica.trim(sequence, sequence.room_needed)
        while replica.shortfall() > replica.num_available:
            if len(replica.running) == 1:
                raise RuntimeError("the cache has no room for the only sequence in it")
            youngest = replica.running[-1]
            if youngest in fresh:
                fresh.remove(youngest)
            else:
                if youngest.request.params.mode == "paper":
                    youngest.resume = self._device.save(youngest.index, youngest.request)
                self._released.append(youngest.index)
            replica.remove(youngest)
            self._waiting.put(youngest)
            self._preemptions += 1

    def _admission(self, sequence: SequenceState) -> Admission:
        """Counts a sequence that starts or resumes, and describes it to the device."""
        text, cached = np.array(sequence.text, np.int32), sequence.num_computed
        if sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = cached
            self._prompt_tokens += len(text) - cached
        self._prefix_tokens += cached
        resume, sequence.resume = sequence.resume, None
        return Admission(
            sequence.index,
            sequence.request,
            text,
            cached,
            resume,
            sequence.lookup,
            sequence.num_forwards,
            sequence.num_token_instances,
        )

    def _burst(
        self, turn: AdmissionRound, admissions: list[Admission], max_forwards: int | None
    ) -> Burst:
        sizes = self._sizes
        chunks = self._pace.next_chunks(self._replicas)
        length = burst_length(
            [replica.running for replica in self._replicas],
            longest=sizes.longest_burst,
            prefill_forwards=max(prefill_forwards(r, chunks.tokens) for r in self._replicas),
            chunks=chunks,
            num_waiting=len(self._waiting),
            num_deferred=turn.num_deferred,
            pages_are_short=turn.pages_are_short,
            soon=max_forwards is not None,
        )
        forwards = min(
            give_pages(replica, length.forwards) for replica in self._replicas if replica.running
        )
        limits = [n for n in (max_forwards, self._windows.most_forwards) if n is not None]
        forwards = min([forwards, *limits])
        capacity, windows = np.zeros((2, len(self._table)), np.int32)
        arrival = np.full(len(self._table), sizes.sequences_each, np.int32)
        for replica in self._replicas:
            for rank, sequence in enumerate(replica.running):
                index = sequence.index
                capacity[index] = replica.capacity(sequence)
                windows[index], arrival[index] = sequence.window, rank
        released, self._released = self._released, []
        return Burst(
            released,
            admissions,
            self._table.copy(),
            capacity,
            arrival,
            windows,
            chunks.tokens,
            forwards,
            np.array(length.until_finished, np.int32),
        )

    # --- taking in a report -----------------------------------------------------------------

    def _collect(self, report: Report, members: Sequence[Member]) -> Iterator[Event]:
        self._progress = False
        for member in members:
            sequence, index = member.sequence, member.index
            if not member.is_present:
                self._progress = True
                continue
            before = (sequence.num_computed, sequence.num_forwards)
            replica = self._replica_of(sequence)
            error = report.errors.get(index)
            if error is not None:
                self._progress = True
                self._remove(sequence)
                yield Failed(sequence.request, error)
                continue
            yield from self._take_in(sequence, report)
            replica.store(sequence)
            self._progress |= (sequence.num_computed, sequence.num_forwards) != before
            if report.finished[index]:
                self._progress = True
                reason = "stop" if report.stopped[index] else "length"
                self._remove(sequence)
                yield Finished(sequence.request, sequence.result(reason))

    def _take_in(self, sequence: SequenceState, report: Report) -> Iterator[Event]:
        index, new = sequence.index, report.tokens[sequence.index]
        sequence.num_forwards = int(report.num_forwards[index])
        sequence.num_token_instances = int(report.num_token_instances[index])
        if index in report.traced:
            committed = [] if new is None else list(new.token_ids)
            counts = sequence.num_forwards, sequence.num_token_instances
            yield Traced(sequence.request, report.traced[index], committed, *counts)
        if new is not None and len(new.token_ids):
            sequence.append(new)
            yield TokenDelta(
                sequence.request,
                list(new.token_ids),
                None if new.logprobs is None else list(new.logprobs),
                sequence.num_output,
                sequence.num_forwards,
                sequence.num_token_instances,
                list(new.forwards_at),
                list(new.instances_at),
                list(new.drafts_at),
                max(sequence.num_cached_tokens, 0),
            )
        computed, output = int(report.num_computed[index]), int(report.num_output[index])
        fits = sequence.num_computed <= computed <= len(sequence.text)
        if output != sequence.num_output or not fits:
            raise RuntimeError(
                f"request {sequence.number}: the device reports {output} tokens of output and "
                f"{computed} computed (before: {sequence.num_computed}); the host has "
                f"{sequence.num_output} tokens of output and {len(sequence.text)} of text"
            )
        sequence.num_computed = computed

    def _remove(self, sequence: SequenceState) -> None:
        self._replica_of(sequence).remove(sequence)
        del self._sequences[sequence.number]

    # --- numbers ----------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """The current counters."""
        running = self._running
        free = sum(replica.pages.num_free for replica in self._replicas)
        cached = sum(replica.tree.num_evictable for replica in self._replicas)
        total = sum(replica.pages.num_usable for replica in self._replicas)
        size = self._sizes.page_size
        shared = sum(r.tree.num_pages - r.tree.num_evictable for r in self._replicas)
        unshared = [one.num_computed - size * len(one.nodes) for one in running]
        spans = [
            min(one.room_needed - one.num_computed, one.num_pages * size - one.num_computed)
            for one in running
        ]
        return Counters(
            running=len(running),
            waiting=len(self._waiting),
            pages=total,
            pages_free=free,
            pages_cached=cached,
            pages_used=total - free - cached,
            places_computed=shared * size + sum(unshared),
            places_spanned=sum(spans),
            prefix_tokens=self._prefix_tokens,
            prompt_tokens=self._prompt_tokens,
            preemptions=self._preemptions,
        )
