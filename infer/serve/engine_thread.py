"""The engine in a thread of its own: requests and aborts in, events out to asyncio.

Everything else of the server runs in one event loop; the two meet in the inbox here and in
`call_soon_threadsafe`, once a step each way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from infer.serve.programs import Programs
from wedlm_jax.completion import NO_DRAFTS, Drafts
from wedlm_jax.decode.options import Traits
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.events import Counters, Event, Failed, Finished, TokenDelta

LOG = logging.getLogger("wedlm.serve")

Deliver: TypeAlias = Callable[[list[Event]], None]
"""Takes the events of one caller's requests in a step, in the event loop."""


class EngineFailure(RuntimeError):
    """The engine failed while a request was under way."""


@dataclasses.dataclass(frozen=True)
class Status:
    """The engine's state after a step.

    Attributes:
      counters: counters of the scheduler.
      forwards: forwards so far.
      drafts: that rows have checked so far, and those they agreed with.
      compile_seconds: so far.
      held: requests that wait for a program to be compiled.
      restarts: how often the engine restarted after an exception.
      broken: whether it could not.
    """

    counters: Counters
    forwards: int = 0
    drafts: Drafts = NO_DRAFTS
    compile_seconds: float = 0.0
    held: int = 0
    restarts: int = 0
    broken: bool = False


@dataclasses.dataclass
class _Turn:
    """Requests and aborts since the last step."""

    submitted: list[tuple[Request, Deliver]] = dataclasses.field(default_factory=list)
    aborted: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Caller:
    """The receiver of a request's events.

    Attributes:
      hurried: whether they are all wanted at once: a stop string may stand in them, or they are
        looked at one by one.
      held: tokens that are not delivered yet.
      last: when the last ones were.
    """

    deliver: Deliver
    hurried: bool
    held: TokenDelta | None = None
    last: float = -math.inf


class EngineThread:
    """Steps an engine for callers in an event loop.

    Programs are compiled in another thread, and nobody waits for one who can be decoded without.

    Args:
      engine: which nobody else steps.
      burst_seconds: most seconds of decoding between two looks at new requests. Tokens of shorter
        bursts are delivered together, twice in that time at most: each delivery costs time.
    """

    def __init__(self, engine: Engine, *, burst_seconds: float):
        self._engine, self._burst_seconds = engine, burst_seconds
        self._numbers = itertools.count()
        self._inbox, self._arrived = _Turn(), threading.Condition()
        self._closing = False
        self._callers: dict[int, _Caller] = {}
        self._held: list[Request] = []
        self._program: Traits | None = None
        self._programs = Programs(engine, self._wake)
        self._restarts, self._broken = 0, False
        self.status = Status(engine.counters)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called in the event loop -------------------------------------------------------

    def start(self) -> None:
        """Begins; events are delivered in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Ends after the present step, whatever is under way."""
        with self._arrived:
            self._closing = True
            self._arrived.notify()
        await asyncio.to_thread(self._thread.join)

    def new_number(self) -> int:
        """Names a request."""
        return next(self._numbers)

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Submits checked requests, which join at the next step."""
        with self._arrived:
            self._inbox.submitted += [(request, deliver) for request in requests]
            self._arrived.notify()

    def abort(self, numbers: Sequence[int]) -> None:
        """Ends requests at the next step, which frees their pages; unknown ones are ignored."""
        with self._arrived:
            self._inbox.aborted += numbers
            self._arrived.notify()

    @property
    def window_size(self) -> int | str:
        """W of requests that name none, or "auto"."""
        return self._engine.window_size

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way, or in the inbox."""
        with self._arrived:
            inbox = self._inbox.submitted or self._inbox.aborted
        return bool(inbox or self._callers)

    @property
    def is_compiling(self) -> bool:
        return self._programs.is_compiling

    # --- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while (turn := self._next_turn()) is not None:
            try:
                events = self._step(turn)
            except Exception as error:
                LOG.exception("the engine failed; it restarts and drops the requests in progress")
                events = self._begin_anew(error)
            self._send(events)

    def _next_turn(self) -> _Turn | None:
        """Returns what has come in since the last step, and waits for it if there is nothing to
        decode; None at the end."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: (
                    self._closing
                    or self._inbox.submitted
                    or self._inbox.aborted
                    or self._has_work
                    or (self._held and not self._programs.is_compiling)
                )
            )
            turn, self._inbox = self._inbox, _Turn()
            return None if self._closing else turn

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work and not self._broken

    def _step(self, turn: _Turn) -> list[Event]:
        engine = self._engine
        for request, deliver in turn.submitted:
            hurried = request.traced or bool(request.params.stop)
            self._callers[request.number] = _Caller(deliver, hurried)
        if self._broken:
            error = EngineFailure("the engine could not be restarted")
            return [Failed(number, error) for number in self._callers]
        for number in turn.aborted:
            self._callers.pop(number, None)
        gone = set(turn.aborted)
        waiting = [*self._held, *(request for request, _ in turn.submitted)]
        ready, failed = self._admit([r for r in waiting if r.number not in gone])
        events = engine.step(
            ready,
            turn.aborted,
            seconds=self._burst_seconds,
            ahead=True,
            program=self._program,
        )
        self._note()
        return failed + events

    def _admit(self, waiting: list[Request]) -> tuple[list[Request], list[Event]]:
        """Returns which requests join now, and the failures of those that never can."""
        failed: list[Event] = []
        failure = self._programs.failure()
        if failure is not None:
            number, error = failure
            failed.append(Failed(number, error))
            waiting = [request for request in waiting if request.number != number]
        sound = []
        for request in waiting:
            try:
                self._engine.traits_of(request)
                sound.append(request)
            except Exception as fault:
                failed.append(Failed(request.number, fault))
        ready, self._held, traits = self._programs.choose(sound)
        self._program = self._engine.compiled_for(traits)
        self._programs.compile(self._held, traits)
        return ready, failed

    def _wake(self) -> None:
        with self._arrived:
            self._arrived.notify()

    def _begin_anew(self, error: Exception) -> list[Event]:
        """Fails everything that was under way: which request was the cause, if any, cannot be
        known."""
        self._restarts += 1
        self._held = []
        try:
            self._engine.restart()
        except Exception:  # whatever it is: the server lives on, and says that it is broken
            LOG.exception("the engine cannot be restarted")
            self._broken = True
        self._note()
        failure = EngineFailure(f"the engine failed ({type(error).__name__})")
        return [Failed(number, failure) for number in self._callers]

    def _note(self) -> None:
        device = self._engine.device
        self.status = Status(
            self._engine.counters,
            int(device.counters[0]),
            device.drafts,
            self._engine.compile_seconds,
            len(self._held),
            self._restarts,
            self._broken,
        )

    def _send(self, events: Sequence[Event]) -> None:
        """Delivers events to those who wait for them, all of a caller at once."""
        now, callers = time.perf_counter(), self._callers
        parcels: dict[Deliver, list[Event]] = {}

        def deliver(caller: _Caller, *more: Event) -> None:
            held, caller.held, caller.last = caller.held, None, now
            parcel = parcels.setdefault(caller.deliver, [])
            parcel.extend(more if held is None else (held, *more))

        for event in events:
            caller = callers.get(event.number)
            if caller is None:
                continue
            if isinstance(event, TokenDelta):
                held = caller.held
                caller.held = event if held is None else held.followed_by(event)
                continue
            deliver(caller, event)
            if isinstance(event, Finished | Failed):
                del callers[event.number]
        for caller in callers.values():
            waited = now - caller.last
            if caller.held and (caller.hurried or waited >= self._burst_seconds / 2):
                deliver(caller)
        if parcels:
            self._loop.call_soon_threadsafe(_hand_out, parcels)


def _hand_out(parcels: dict[Deliver, list[Event]]) -> None:
    for deliver, events in parcels.items():
        deliver(events)
