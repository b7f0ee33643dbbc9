"""The window of each sequence in the next burst: the interface, and fixed windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wedlm_jax.engine.burst import Burst, Report, Request
from wedlm_jax.engine.scheduling.sequence import SequenceState


class WindowChoice(Protocol):
    """Chooses windows from burst to burst."""

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get, for which room is kept."""

    def choose(self, running: Sequence[SequenceState]) -> Sequence[int]:
        """Returns the window of each sequence in the next burst, no wider than `widest`."""

    def observe(self, burst: Burst, report: Report, seconds: float) -> None:
        """Learns from the report of a burst, and from how long it took."""


class FixedWindows:
    """Gives each request its own window, or else the engine's.

    Args:
      window: W of requests that name none; 0 decodes autoregressively.
    """

    def __init__(self, window: int):
        self._window = window

    def widest(self, request: Request) -> int:
        if request.params.mode == "ar":
            return 0
        return self._window if request.window is None else request.window

    def choose(self, running: Sequence[SequenceState]) -> Sequence[int]:
        return [self.widest(sequence.request) for sequence in running]

    def observe(self, burst: Burst, report: Report, seconds: float) -> None:
        pass
