"""Which compiled program decodes the requests of a server, and which are compiled beside it.

A server starts with two programs: a fast one for requests that ask for nothing special, and one
for everything. So no request waits for the compiler: what the fast one cannot decode, the other
does at once, until one that fits better has been compiled in the background.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from wedlm_jax.decode.options import Traits
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Failed, Request

LOG = logging.getLogger("wedlm.serve")

MOST_PROGRAMS = 8
"""Programs that are compiled because they would fit better, at most: each takes memory, and its
compilation a share of this machine's processors."""


class Programs:
    """Chooses programs and compiles them, one at a time, in another thread.

    Args:
      engine: stepped by the caller, in its own thread.
      on_change: called in the other thread when a compilation is over.

    Attributes:
      is_compiling: whether one is under way.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None]):
        self._engine, self._on_change = engine, on_change
        self._needed: tuple[Traits, Request] | None = None
        self._failed: dict[Traits, Exception] = {}
        self._made, self._had_to_wait = 0, False
        self.is_compiling = False

    def choose(self, waiting: Sequence[Request]) -> tuple[list[Request], list[Request], Traits]:
        """Chooses which requests can join those under way.

        Returns:
          the requests that can, those that wait for a program, and the traits of all that are under
          way then.
        """
        engine = self._engine
        ready, held = list[Request](), list[Request]()
        traits = engine.traits_with([])
        for request in waiting:
            both = traits.union(engine.traits_of(request))
            if engine.compiled_for(both) is None:
                held.append(request)
            else:
                ready.append(request)
                traits = both
        return ready, held, traits

    def compile(self, held: Sequence[Request], under_way: Traits) -> None:
        """Compiles what is missing most, unless something is being compiled.

        Args:
          held: requests that wait; the first comes first.
          under_way: the traits of all requests that do not.
        """
        if self.is_compiling:
            return
        engine = self._engine
        if held:
            needed = engine.traits_with([held[0]]).rounded
            self._needed, self._had_to_wait = (needed, held[0]), True
            self._start(needed)
            return
        present = engine.compiled_for(under_way)
        everything, better = engine.everything, under_way.rounded
        if self._had_to_wait and everything not in self._failed:
            # The server began without the two programs: nobody is to wait again.
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

    def failure(self) -> Failed | None:
        """Returns the failure of the request whose program could not be compiled, once: the next
        request that needs it tries again."""
        if self.is_compiling or self._needed is None:
            return None
        (traits, request), self._needed = self._needed, None
        error = self._failed.pop(traits, None)
        return None if error is None else Failed(request, error)

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
