"""Reports a run that stands still: the stacks of all threads, when a step takes far too long."""

from __future__ import annotations

import collections
import faulthandler
import statistics
import sys
import time
from collections.abc import Callable
from typing import IO, Self

LEAST_S = 30.0
"""No shorter wait is a stall."""
FEWEST = 5
"""Steps whose times must be known."""
REMEMBERED = 100
LONGEST_PAUSE_S = 600.0
"""What a checkpoint or an evaluation may take."""


class StallWatch:
    """Writes the stacks of all threads when a step takes ``factor`` times the median of the last.

    The run goes on. The interpreter's own watchdog thread writes them, without Python, so that a
    process stuck in a collective or a file system tells, too. A context manager.

    Args:
      factor: 0 for never.
      file: where to; it needs a file descriptor. Default: standard error.
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
        """Returns the seconds that the next step may take; None while nothing is known."""
        if not self._factor or len(self._times) < FEWEST:
            return None
        return max(self._factor * statistics.median(self._times), self._least)

    def step(self) -> None:
        """Notes that a step is over, and the next has begun."""
        now = self._now()
        if self._since is not None:
            self._times.append(now - self._since)
        self._since = now
        faulthandler.cancel_dump_traceback_later()  # what `pause` allows is over
        if self.limit is not None and self._file is not None:
            faulthandler.dump_traceback_later(self.limit, file=self._file)

    def pause(self) -> None:
        """Notes that until the next call of `step`, nothing is a step: a checkpoint, an
        evaluation."""
        self._since = None
        if self._factor and self._file is not None:
            faulthandler.dump_traceback_later(LONGEST_PAUSE_S, file=self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
