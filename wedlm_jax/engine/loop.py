"""Steps an engine in its own thread, for callers in other threads.

Requests and aborts may come at any time and take effect at the next step; events are delivered to
the caller named by each request's handle. The thread runs while there is work, and a little longer.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from wedlm_jax.decode.options import Traits
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Event, Failed, Request, TokenDelta
from wedlm_jax.errors import INTERRUPTED
from wedlm_jax.host.signals import beside_main_thread

IDLE_SECONDS = 1.0
"""How long the thread waits for new requests after the last one has ended. Starting it takes as
long as several forwards of a small model, and a client often asks again at once."""


class Caller:
    """Receives the events of one or more requests.

    Args:
      take: called with all the caller's events from a step.
      seconds: target limit on a burst's duration, for a caller that shows tokens as they come; None
        lets the engine choose.
      patience: how many seconds new tokens may be held back to be delivered together with later
        ones, since each delivery takes time. An event that ends a request is delivered at once.
    """

    def __init__(
        self,
        take: Callable[[list[Event]], None],
        *,
        seconds: float | None = None,
        patience: float = 0.0,
    ):
        self.take, self.seconds, self._patience = take, seconds, patience
        self._events: list[Event] = []
        self._deltas: dict[int, int] = {}
        """The index in `_events` of a request's held tokens, by request number."""
        self._is_urgent, self._last = False, -math.inf

    def hold(self, event: Event) -> None:
        """Keeps an event until `released` returns it; a request's tokens are merged into one."""
        place = self._deltas.get(event.number)
        if not isinstance(event, TokenDelta):
            self._deltas.pop(event.number, None)
            self._is_urgent = True
        elif place is not None:
            earlier = self._events[place]
            assert isinstance(earlier, TokenDelta)
            self._events[place] = earlier.followed_by(event)
            return
        else:
            self._deltas[event.number] = len(self._events)
        self._events.append(event)

    def released(self, now: float) -> list[Event]:
        """Returns the events that are due at a time, by `time.perf_counter`."""
        if not (self._is_urgent or now - self._last >= self._patience):
            return []
        events, self._events, self._deltas = self._events, [], {}
        self._is_urgent, self._last = False, now
        return events


Parcels: TypeAlias = list[tuple[Caller, list[Event]]]
"""The events to deliver after a step, by caller."""


@dataclasses.dataclass
class _Inbox:
    submitted: list[Request] = dataclasses.field(default_factory=list)
    aborted: list[int] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.submitted or self.aborted)


class EngineLoop:
    """Steps an engine for all its callers.

    When a step raises, all current requests fail with its exception, since the request that caused
    it is unknown, and the engine is restarted.

    Args:
      engine: the engine; only the loop steps it, unless the loop is `paused`.

    Attributes:
      engine: the engine.
      restarts: how often the engine was restarted.
      is_broken: whether a restart failed; all requests fail from then on.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.restarts, self.is_broken = 0, False
        self._numbers = itertools.count()
        # The garbage collector may close a generator, which aborts its requests, in any thread at
        # any line. A condition's lock is reentrant, so this is safe in the thread that holds it.
        self._changed = threading.Condition()
        self._inbox = _Inbox()
        self._thread: threading.Thread | None = None
        self._is_busy = self._is_stepping = self._is_closing = False
        self._pauses, self._one_pause = 0, threading.Lock()
        self._holding: set[Caller] = set()

    # --- called in any thread -----------------------------------------------------------

    def new_number(self) -> int:
        """Returns a number for a request."""
        return next(self._numbers)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submits checked requests, which join at the next step."""
        with self._changed:
            self._inbox.submitted += requests
            self._is_busy = True
            if self._thread is None:
                # The interpreter must not exit during a step; this waits for the step to end.
                atexit.register(self._close_at_exit)
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def abort(self, numbers: Sequence[int]) -> None:
        """Ends requests at the next step, which frees their pages. Unknown numbers are ignored. No
        more events come, except those that are being delivered at this moment."""
        with self._changed:
            if len(numbers) and self._is_busy:
                self._inbox.aborted += numbers
                self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Reserves the engine for the block; requests wait."""
        with self._one_pause:
            with self._changed:
                self._pauses += 1
                self._changed.wait_for(lambda: not self._is_stepping)
            try:
                yield
            finally:
                with self._changed:
                    self._pauses -= 1
                    self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether any request is running, waiting or submitted."""
        with self._changed:
            return self._is_busy

    def close(self) -> None:
        """Ends the thread after the current step and aborts all requests."""
        with self._changed:
            thread, self._is_closing = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._is_closing = False

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except KeyboardInterrupt:  # XLA crashes if the interpreter exits during a step
            os._exit(INTERRUPTED)

    # --- what a server overrides ----------------------------------------------------------

    def _admitted(self, waiting: list[Request]) -> tuple[list[Request], list[Event], Traits | None]:
        """Decides which waiting requests join now. Returns them, `Failed` events for refused ones,
        and the traits of the program to run (None for the smallest that serves all). The remaining
        requests are offered again at the next step."""
        return waiting, [], None

    def _may_wait(self) -> bool:
        """Returns whether requests that have not joined may wait without a step."""
        return False

    def _hand_out(self, parcels: Parcels) -> None:
        """Delivers events."""
        for caller, events in parcels:
            caller.take(events)

    def _stepped(self) -> None:
        """Called after every step."""

    def _failed(self, error: Exception) -> None:
        """Called with the exception that a step or a restart has raised."""

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        waiting: list[Request] = []
        while (inbox := self._next_turn(waiting)) is not None:
            gone = set(inbox.aborted)
            waiting = [one for one in waiting + inbox.submitted if one.number not in gone]
            try:
                with beside_main_thread():
                    waiting, events = self._step(waiting, inbox.aborted)
            except Exception as error:
                events = self._start_afresh(error, waiting)
                waiting = []
            self._stepped()
            parcels = self._parcels(events, gone)
            # Once the last event is delivered, its caller may use the engine in other ways.
            self._end_step(waiting)
            if parcels:
                self._hand_out(parcels)

    def _next_turn(self, waiting: list[Request]) -> _Inbox | None:
        """Waits until there is something to do and returns what was submitted or aborted since the
        last step; None if the loop was closed meanwhile, or nothing came for `IDLE_SECONDS`."""

        def may_go_on() -> bool:
            # A loop without requests leaves the engine alone, since others may be using it.
            ready = self._is_busy and (self._has_work or bool(waiting and not self._may_wait()))
            return self._is_closing or (ready and not self._pauses)

        with self._changed:
            while not self._changed.wait_for(may_go_on, IDLE_SECONDS):
                if not (self._is_busy or self._pauses):
                    break
            if self._is_closing or not self._is_busy:
                self._end()
                return None
            self._is_stepping = True
            inbox, self._inbox = self._inbox, _Inbox()
            return inbox

    @property
    def _has_work(self) -> bool:
        return bool(self._inbox) or (self.engine.has_work and not self.is_broken)

    def _end_step(self, waiting: list[Request]) -> None:
        with self._changed:
            self._is_stepping = False
            self._is_busy = bool(waiting or self._has_work)
            self._changed.notify_all()

    def _end(self) -> None:
        if self._is_busy and self.engine.has_work and not self.is_broken:
            self.engine.step(aborted=self.engine.scheduler.numbers, max_forwards=0)
            self._stepped()
        self._inbox, self._thread, self._is_busy = _Inbox(), None, False
        self._holding.clear()
        atexit.unregister(self._close_at_exit)

    def _step(
        self, waiting: list[Request], aborted: Sequence[int]
    ) -> tuple[list[Request], list[Event]]:
        """Runs a step; returns the requests that have not joined yet, and the events."""
        engine = self.engine
        if self.is_broken:
            error = RuntimeError("the engine failed and could not be restarted")
            return [], [Failed(request, error) for request in waiting]
        ready, failed, program = self._admitted(waiting)
        over = {one.number for one in ready} | {event.number for event in failed}
        handles = (request.handle for request in [*engine.scheduler.requests, *ready])
        callers = {handle.caller for handle in handles if handle is not None}
        limits = [one.seconds for one in callers if one.seconds is not None]
        events = engine.step(
            ready, aborted, seconds=min(limits, default=None), ahead=True, program=program
        )
        return [one for one in waiting if one.number not in over], failed + events

    def _start_afresh(self, error: Exception, waiting: list[Request]) -> list[Event]:
        self._failed(error)
        lost = {one.number: one for one in [*self.engine.scheduler.requests, *waiting]}
        self.restarts += 1
        try:
            self.engine.restart()
        except Exception as fault:  # of any kind: from now on every request fails
            self._failed(fault)
            self.is_broken = True
        return [Failed(request, error) for request in lost.values()]

    def _parcels(self, events: Sequence[Event], gone: set[int]) -> Parcels:
        """Adds these events, except those of aborted requests, and returns all that are due now."""
        now = time.perf_counter()
        for event in events:
            handle = event.request.handle
            if handle is not None and event.number not in gone:
                handle.caller.hold(event)
                self._holding.add(handle.caller)
        parcels = [(caller, due) for caller in self._holding if (due := caller.released(now))]
        self._holding.difference_update(caller for caller, _ in parcels)
        return parcels
