"""SIGTERM: a run that is asked to end saves its state first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from jax.experimental import multihost_utils

from wedlm_jax.processes import jax_processes

EXIT_STATUS = 128 + signal.SIGTERM
"""Of a run that was stopped: not 0, so that what waits for the model does not go on."""


class Stopped(Exception):
    """The run ended on request, with its state saved.

    Attributes:
      step: completed steps.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}")
        self.step = step


class StopRequest:
    """Notes SIGTERM while it is open.

    In a multi-process run the processes agree on the step after which they stop, through the
    coordinator that `jax.distributed` started: only one of them may have got the signal.
    """

    def __init__(self) -> None:
        self._noted = False
        self._alone = jax_processes().count == 1

    def __enter__(self) -> StopRequest:
        if self._alone:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._alone:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    def after(self, step: int) -> bool:
        """Whether the run shall stop after ``step`` completed steps. Every process asks once
        after every step."""
        if self._alone:
            return self._noted
        return multihost_utils.reached_preemption_sync_point(step)
