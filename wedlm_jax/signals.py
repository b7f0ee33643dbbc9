"""SIGTERM: the one place that handles it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a process that was asked to end: not 0, so that what waits for it does not go
on."""
INTERRUPTED = 128 + signal.SIGINT
"""The same after Ctrl-C."""


class StopRequest:
    """Notes SIGTERM while it is open.

    Attributes:
      requested: whether it has come.
    """

    def __init__(self) -> None:
        self.requested = False
        # Only there can signals be handled; elsewhere, as in a Ray actor, others see to them.
        self._handles = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._handles:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.note()

    def note(self) -> None:
        """Takes in that SIGTERM has come."""
        self.requested = True
