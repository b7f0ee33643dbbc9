"""The window of each sequence in the next burst: the interface, and fixed windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wedlm_jax.engine.burst import Burst, Report, Request
from wedlm_jax.engine.scheduling.sequence import SequenceState


def widest_window(request: Request, usual: int) -> int:
    """Returns the widest window of a request.

    Args:
      usual: of requests that name none.
    """
    params = request.params
    if params.mode == "ar" or (params.mode == "verified" and params.draft in ("lookup", "none")):
        return 0
    return usual if request.window is None else request.window


def most_copies(request: Request, usual: int) -> int:
    """Returns the most drafts that may be copied from a request's text: none where its mode or a
    window of 0 makes it autoregressive."""
    params = request.params
    copies = params.mode == "verified" and params.draft in ("auto", "lookup")
    return usual if copies and request.window != 0 else 0


class WindowChoice(Protocol):
    """Chooses windows from burst to burst."""

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get, for which room is kept."""

    def lookup(self, request: Request) -> int:
        """Returns the most drafts that are copied from a request's text."""

    def choose(self, running: Sequence[SequenceState]) -> Sequence[int]:
        """Returns the window of each sequence in the next burst, no wider than `widest`."""

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        """Learns from the report of a burst, and from how long it took, where that is known.

        Args:
          running: the sequences that it was chosen for; some may have left since.
        """


class FixedWindows:
    """Gives each request its own window, or else the engine's.

    Args:
      window: W of requests that name none.
      lookup: the most drafts that are copied from a text. With windows of masks only where a
        request asks for it: how many forwards it takes is then no matter of measured costs.
    """

    def __init__(self, window: int, lookup: int = 0):
        self._window, self._lookup = window, lookup

    def widest(self, request: Request) -> int:
        return widest_window(request, self._window)

    def lookup(self, request: Request) -> int:
        if request.params.draft == "auto" and self.widest(request):
            return 0
        return most_copies(request, self._lookup)

    def choose(self, running: Sequence[SequenceState]) -> Sequence[int]:
        return [self.widest(sequence.request) for sequence in running]

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        pass
