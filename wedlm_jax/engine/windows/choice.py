"""How wide the window of each sequence is in the next burst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wedlm_jax.engine.burst import Burst, Report, Request
from wedlm_jax.engine.sequence import SequenceState


class WindowChoice(Protocol):
    """Chooses windows from burst to burst."""

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get: room is kept for it."""

    def choose(self, running: Sequence[SequenceState]) -> Sequence[int]:
        """Returns the window of each sequence in the next burst, no wider than `widest`."""

    def observe(self, burst: Burst, report: Report, seconds: float) -> None:
        """Learns what a burst has done, and how long it took."""


class FixedWindows:
    """Each request's own window, or the engine's.

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
