"""Signals that end a program well: the one place that handles them.

Tested by tests/infer/job/test_graceful_stop.py.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from wedlm_jax.errors import TERMINATED


class StopRequest:
    """Notes a signal while it is open.

    Args:
      signals: others to note instead. Beside another, Ctrl-C (SIGINT) is noted once, and a second
        one interrupts; alone it is noted as often as it comes.

    Attributes:
      requested: whether one has come.
      status: the exit status that tells which: 128 and its number.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.requested, self.status = False, TERMINATED
        # Only the main thread can handle signals; elsewhere, as in a Ray actor, the host program
        # does.
        main = threading.current_thread() is threading.main_thread()
        self._signals = (signals or (signal.SIGTERM,)) if main else ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {one: signal.signal(one, self._handle) for one in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.status = 128 + number
        if number == signal.SIGINT and len(self._signals) > 1:
            signal.signal(number, signal.default_int_handler)
        self.note()

    def note(self) -> None:
        """Notes that a signal has arrived."""
        self.requested = True
