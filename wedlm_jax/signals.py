"""SIGTERM, and Ctrl-C where it ends something smaller than the program: the one place that
handles them."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

TERMINATED = 128 + signal.SIGTERM
"""Exit status after SIGTERM: not 0, so that a script that waits for the process does not
continue."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C."""


class StopRequest:
    """Notes a signal while it is open.

    Args:
      number: of the signal.

    Attributes:
      requested: whether it has come.
    """

    def __init__(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.requested, self._number = False, number
        # Only the main thread can handle signals; elsewhere, as in a Ray actor, the host program
        # does.
        self._handles = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._handles:
            self._before = signal.signal(self._number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handles:
            signal.signal(self._number, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note()

    def note(self) -> None:
        """Notes that the signal has arrived."""
        self.requested = True
