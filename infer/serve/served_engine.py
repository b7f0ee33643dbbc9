"""The engine's loop behind a server: events are delivered in asyncio's loop, and programs compile
in the background.

A server starts with two compiled programs: a fast one for requests without special options, and one
for every option. So no request waits for the compiler: what the fast one cannot decode, the other
decodes until a program that fits better has been compiled.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from wedlm_jax.decode.options import Traits
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Event, Failed, Request
from wedlm_jax.engine.loop import EngineLoop, Parcels

LOG = logging.getLogger("wedlm.serve")

MOST_PROGRAMS = 8
"""Maximum number of programs compiled only because they fit better: each takes memory, and
compiling it takes processor time."""


class Programs:
    """Chooses programs and compiles them in another thread, one at a time.

    Args:
      engine: stepped by the caller, in its own thread.
      on_change: called in the other thread when a compilation ends.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None]):
        self._engine, self._on_change = engine, on_change
        self._needed: tuple[Traits, Request] | None = None
        self._failed: dict[Traits, Exception] = {}
        self._made, self._had_to_wait = 0, False
        self.is_compiling = False

    def admit(
        self, waiting: Sequence[Request]
    ) -> tuple[list[Request], list[Request], list[Failed], Traits]:
        """Chooses the requests that can join the running ones, and starts to compile what is
        missing.

        Returns:
          the requests that can join, those that wait for a program, those that cannot be decoded,
          and the traits of all that then run.
        """
        engine = self._engine
        ready, held, failed = list[Request](), list[Request](), self._failures()
        traits = engine.traits_with([])
        for request in waiting:
            if any(request.number == one.number for one in failed):
                continue
            try:
                both = traits.union(engine.traits_of(request))
            except Exception as fault:
                failed.append(Failed(request, fault))
                continue
            if engine.compiled_for(both) is None:
                held.append(request)
            else:
                ready.append(request)
                traits = both
        if not self.is_compiling:
            self._compile_next(held, traits)
        return ready, held, failed, traits

    def _compile_next(self, held: Sequence[Request], running: Traits) -> None:
        """Starts to compile the program needed most: for the first waiting request, for everything,
        or one that fits the running requests better."""
        engine = self._engine
        if held:
            needed = engine.traits_with([held[0]]).rounded
            self._needed, self._had_to_wait = (needed, held[0]), True
            self._start(needed)
            return
        present = engine.compiled_for(running)
        everything, better = engine.everything, running.rounded
        if self._had_to_wait and everything not in self._failed:
            # The server started without the two programs: no request should wait again.
            self._had_to_wait = False
            if engine.compiled_for(everything) is None:
                self._start(everything)
        elif (
            present is not None
            and present.are_everything
            and not better.are_everything
            and better not in self._failed
            and self._made < MOST_PROGRAMS
        ):
            self._made += 1
            self._start(better)

    def _failures(self) -> list[Failed]:
        """Returns, once, the failure of the request whose program could not be compiled; the next
        request that needs this program tries again."""
        if self.is_compiling or self._needed is None:
            return []
        (traits, request), self._needed = self._needed, None
        error = self._failed.pop(traits, None)
        return [] if error is None else [Failed(request, error)]

    def _start(self, traits: Traits) -> None:
        self.is_compiling = True
        threading.Thread(target=self._compile, args=[traits], name="compiler", daemon=True).start()

    def _compile(self, traits: Traits) -> None:
        try:
            self._engine.compile_program(traits)
        except Exception as error:
            LOG.exception("a program could not be compiled")
            self._failed[traits] = error
        self.is_compiling = False
        self._on_change()


class ServedEngine(EngineLoop):
    """Steps an engine for callers in an event loop; see `EngineLoop`.

    Attributes:
      programs: chooses and compiles programs.
      counters: the scheduler's, after the last step.
      num_held: requests that wait for a program to be compiled.
    """

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.programs = Programs(engine, self._look_again)
        self.num_held, self.counters = 0, engine.counters

    def start(self) -> None:
        """Delivers events in the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _may_wait(self) -> bool:
        return self.programs.is_compiling

    def _admitted(self, waiting: list[Request]) -> tuple[list[Request], list[Event], Traits | None]:
        ready, held, failed, traits = self.programs.admit(waiting)
        self.num_held = len(held)
        return ready, [*failed], self.engine.compiled_for(traits)

    def _hand_out(self, parcels: Parcels) -> None:
        self._loop.call_soon_threadsafe(super()._hand_out, parcels)

    def _failed(self, error: Exception) -> None:
        LOG.error("the engine failed; it restarts without requests in progress", exc_info=error)

    def _stepped(self) -> None:
        self.counters = self.engine.counters
