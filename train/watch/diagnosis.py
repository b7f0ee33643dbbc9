"""Helps with a run that is slow or stuck: profiles steps for xprof, and prints the stacks of all
threads when a step takes far too long."""

from __future__ import annotations

import collections
import faulthandler
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

import jax

from wedlm_jax.host.processes import is_first, jax_processes

ON_SIGNAL = 5
"""The number of steps that SIGUSR1 profiles if the recipe names none."""


class Profiler:
    """Profiles steps on one host, into the run's folder ``profile``. A context manager.

    The first process records the steps ``first`` to ``first + count - 1``, as far as this attempt
    runs them. SIGUSR1 makes the process that receives it record the next steps.

    Args:
      first, count: first step and number of steps, from the recipe; a ``count`` of 0 records none.
    """

    def __init__(self, output: Path, first: int, count: int):
        self._folder, self._on_signal = output / "profile", count or ON_SIGNAL
        self._window = range(first, first + count if is_first() else first)
        self._asked = False
        self._from, self._until = 0, 0  # no profile is under way
        self._handles = threading.current_thread() is threading.main_thread()

    def before(self, step: int, newest: Any) -> None:
        """Begins or ends a profile before ``step`` runs.

        Args:
          newest: arrays of the newest step; a profile ends when they are ready.
        """
        if self._until and step >= self._until:
            self._stop(step, newest)
        if self._until:
            return
        if self._asked:
            self._asked = False
            self._start(step, step + self._on_signal)
        elif step in self._window:
            self._start(step, self._window.stop)

    def _start(self, step: int, until: int) -> None:
        jax.profiler.start_trace(str(self._folder))
        self._from, self._until = step, until

    def _stop(self, step: int, newest: Any) -> None:
        jax.block_until_ready(newest)
        jax.profiler.stop_trace()
        self._until = 0
        host = f"process {jax_processes().index}: "
        print(f"{host}profile of steps {self._from} to {step - 1} in {self._folder}", flush=True)

    def end(self, step: int, newest: Any) -> None:
        """Ends a profile that is under way; ``step`` follows the last step."""
        if self._until:
            self._stop(step, newest)

    def __enter__(self) -> Self:
        if self._handles:
            self._old = signal.signal(signal.SIGUSR1, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._until:  # the run failed meanwhile
            self._until = 0
            jax.profiler.stop_trace()
        if self._handles:
            signal.signal(signal.SIGUSR1, self._old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = True


LEAST_S = 30.0
"""The shortest wait that counts as a stall."""
FEWEST = 5
"""The number of step times that must be known before a stall is detected."""
REMEMBERED = 100
LONGEST_PAUSE_S = 600.0
"""How long a checkpoint or an evaluation may take."""


class StallWatch:
    """Writes the stacks of all threads when a step takes ``factor`` times the recent median.

    The run continues. The interpreter's own watchdog thread writes the stacks without running
    Python code, so that a process stuck in a collective or a file system reports, too. A context
    manager.

    Args:
      factor: multiple of the median; 0 for never.
      file: where to write; it needs a file descriptor. Standard error by default.
      least: seconds that any step may take.
      now: a clock in seconds.
    """

    def __init__(
        self,
        factor: float,
        file: IO[str] | None = None,
        least: float = LEAST_S,
        now: Callable[[], float] = time.monotonic,
    ):
        self._factor, self._least, self._now = factor, least, now
        self._file = file or sys.__stderr__
        self._times: collections.deque[float] = collections.deque(maxlen=REMEMBERED)
        self._since: float | None = None

    @property
    def limit(self) -> float | None:
        """Returns the seconds that the next step may take; None while too few times are known."""
        if not self._factor or len(self._times) < FEWEST:
            return None
        return max(self._factor * statistics.median(self._times), self._least)

    def step(self) -> None:
        """Notes that a step is over, and the next has begun."""
        now = self._now()
        if self._since is not None:
            self._times.append(now - self._since)
        self._since = now
        faulthandler.cancel_dump_traceback_later()  # ends the limit that `pause` may have set
        if self.limit is not None and self._file is not None:
            faulthandler.dump_traceback_later(self.limit, file=self._file)

    def pause(self) -> None:
        """Notes that no step runs until the next call of `step`, but a checkpoint or an
        evaluation."""
        self._since = None
        if self._factor and self._file is not None:
            faulthandler.dump_traceback_later(LONGEST_PAUSE_S, file=self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
