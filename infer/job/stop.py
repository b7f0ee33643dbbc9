"""SIGTERM: a job that is asked to end finishes what is cheap, and says how to go on."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

EXIT_STATUS = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT

GRACE_SECONDS = 20.0
"""Kubernetes sends SIGKILL 30 seconds after SIGTERM."""


class Stopped(BaseException):
    """The job ends on request. As with Ctrl-C, what handles errors lets it pass."""


class StopRequest:
    """Notes SIGTERM while it is open.

    Outside of `finishing` there is nothing to finish, and the job ends where it stands, by
    `Stopped`. Inside no new rows are begun, and those under way may take ``grace`` seconds.
    A second SIGTERM ends the process at once.

    Args:
      grace: seconds.
    """

    def __init__(self, grace: float = GRACE_SECONDS):
        self._grace, self._deadline = grace, 0.0
        self.requested = self._finishing = False
        # Only there can signals be handled; elsewhere, as in a Ray actor, others see to them.
        self._handles = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopRequest:
        if self._handles:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, self._before)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """A block that has something to finish: it has to ask for ``requested`` and `check`."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def check(self) -> None:
        """Raises `Stopped` if the time of grace is over. To be called now and then."""
        if self.requested and time.monotonic() >= self._deadline:
            raise Stopped

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_STATUS)
        self.requested, self._deadline = True, time.monotonic() + self._grace
        if not self._finishing:
            raise Stopped
