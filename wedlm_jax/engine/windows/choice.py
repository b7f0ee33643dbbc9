"""The window of each sequence in the next burst: the interface, and fixed windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wedlm_jax.engine.burst import Burst, Report, Request
from wedlm_jax.engine.scheduling.sequence import SequenceState
from wedlm_jax.engine.windows.costs import CostTable


class WindowChoice(Protocol):
    """Chooses windows from burst to burst.

    The next burst may be chosen before the report of the last is there, so a report is read by what
    its burst says, never by what was chosen last.

    Attributes:
      costs: what forwards cost, corrected by every burst; None while it is not known.
    """

    costs: CostTable | None

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get, for which room is kept."""

    def lookup(self, request: Request) -> int:
        """Returns the most drafts that are copied from a request's text."""

    def is_free(self, request: Request) -> bool:
        """Tells whether a request's window is chosen anew for each burst, and may be 0."""

    def choose(self, running: Sequence[SequenceState]) -> list[int]:
        """Returns the window of each sequence in the next burst, no wider than `widest`."""

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        """Learns from the report of a burst, before the sequences take it in.

        Args:
          running: those for which it was planned; some may have left meanwhile.
          seconds: that it took; None where that is not known.
        """


class FixedWindows:
    """Gives each request its own window, or else the engine's.

    Args:
      window: W of requests that name none.
      lookup: the most drafts that are copied from a text. With windows of masks only where a
        request asks for it: how many forwards it takes is then no matter of measured costs, and
        what a program with room for copies costs more, it costs whether there are any or not.
    """

    def __init__(self, window: int, lookup: int = 0):
        self._window, self._lookup = window, lookup
        self.costs: CostTable | None = None

    def widest(self, request: Request) -> int:
        params = request.params
        if params.mode == "ar" or (
            params.mode == "verified" and params.draft in ("lookup", "none")
        ):
            return 0
        return self._window if request.window is None else request.window

    def lookup(self, request: Request) -> int:
        params = request.params
        copies = params.draft == "lookup" or (params.draft == "auto" and not self.widest(request))
        # A window of 0 makes a request autoregressive.
        return self._lookup if params.mode == "verified" and copies and request.window != 0 else 0

    def is_free(self, request: Request) -> bool:
        return False

    def choose(self, running: Sequence[SequenceState]) -> list[int]:
        return [self.widest(sequence.request) for sequence in running]

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        if self.costs is not None and seconds is not None and report.sizes:
            self.costs.learn(report.sizes, report.by_size, seconds, windowless=report.windowless)
