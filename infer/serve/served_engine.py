"""The engine's loop behind a server: events go to asyncio, and nobody who can be decoded without it
waits for the compiler."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from infer.serve.programs import Programs
from wedlm_jax.completion import NO_DRAFTS, Drafts
from wedlm_jax.decode.options import Traits
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Counters, Event, Failed, Request
from wedlm_jax.engine.loop import EngineLoop, Parcels

LOG = logging.getLogger("wedlm.serve")


@dataclasses.dataclass(frozen=True)
class Status:
    """Where the engine stands after a step.

    Attributes:
      counters: of the scheduler.
      forwards: of the device so far.
      drafts: checked and accepted so far.
      compile_seconds: so far.
      held: requests that wait for a program to be compiled.
      restarts: how often the engine started afresh after an exception.
      broken: whether it could not.
    """

    counters: Counters
    forwards: int = 0
    drafts: Drafts = NO_DRAFTS
    compile_seconds: float = 0.0
    held: int = 0
    restarts: int = 0
    broken: bool = False


class ServedEngine(EngineLoop):
    """Steps an engine for callers in an event loop; see `EngineLoop`.

    Attributes:
      status: after the last step.
    """

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self._programs = Programs(engine, self._look_again)
        self._num_held = 0
        self.status = Status(engine.counters)

    def start(self) -> None:
        """Lets events be delivered in the running event loop."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_compiling(self) -> bool:
        """Whether a program is compiled in the background."""
        return self._programs.is_compiling

    def _look_again(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _may_wait(self) -> bool:
        return self._programs.is_compiling

    def _admitted(self, waiting: list[Request]) -> tuple[list[Request], list[Event], Traits | None]:
        failed: list[Event] = []
        if (failure := self._programs.failure()) is not None:
            failed.append(failure)
            waiting = [request for request in waiting if request.number != failure.number]
        sound = []
        for request in waiting:
            try:
                self.engine.traits_of(request)
                sound.append(request)
            except Exception as fault:
                failed.append(Failed(request, fault))
        ready, held, traits = self._programs.choose(sound)
        self._programs.compile(held, traits)
        self._num_held = len(held)
        return ready, failed, self.engine.compiled_for(traits)

    def _hand_out(self, parcels: Parcels) -> None:
        self._loop.call_soon_threadsafe(super()._hand_out, parcels)

    def _failed(self, error: Exception) -> None:
        LOG.error("the engine failed; it starts afresh without what was under way", exc_info=error)

    def _stepped(self) -> None:
        device = self.engine.device
        self.status = Status(
            self.engine.counters,
            int(device.counters[0]),
            device.drafts,
            self.engine.compile_seconds,
            self._num_held,
            self.restarts,
            self.is_broken,
        )
