"""How wide a window pays: wide while the device waits for memory, narrow when it computes.

Tokens a second of a batch are, for a window W,

    active rows * tokens per row and forward (W) / seconds per forward (W),

and both are learnt from the prompts themselves, since both depend on them: how many tokens a
forward commits on the text, what it costs on how many slots are filled and how long the texts
are. An autoregressive row commits one, always. So nothing is decoded only to be measured: the first
batch of its sizes begins with a few forwards autoregressively, then a few at each wider window, as
long as they keep promising; then the best one stays, and seldom another is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 0.9
"""Weight of the past where slices are added up."""
TRY_MEMORY = 0.5
"""The same of a window that is tried: what it was found to be long ago should not outlast a try."""
MARGIN = 1.05
"""A window has to promise so many times the speed of autoregressive decoding to be chosen."""
MOST_SURPRISE = 3.0
"""A forward counts for at most so many times what was measured before, or as little: what else a
machine does makes some far too slow, others only seem quick."""

TIMED_EVERY = 16
"""Slices of a window from one whose time is taken to the next."""

TRY_FORWARDS = 8
"""Forwards of a slice with a window that is only tried. It takes two: the first only fills the new
window."""
FIRST_FORWARDS = 16
"""Timed forwards after which a window is known."""
TRY_SHARE = 0.04
"""Share of the time that may go into tries, when all promising windows have had their first."""
TRY_EVERY = 8
"""Slices from one try to the next, at least: each change of width costs something, too."""
MOST_PATIENCE = 32
"""Slices between tries grow to so many times `TRY_EVERY`, twice as many each time that a try has
changed nothing."""
PROMISING = 0.6
"""A window with so much of the best one's speed is worth a try, or its wider neighbour a first."""


class WidthPolicy:
    """Chooses the window of a batch's next slice. One serves all batches of equal sizes.

    Args:
      windows: those that may be chosen, 0 among them.
    """

    def __init__(self, windows: Sequence[int]):
        self._seen = {window: _Seen(window) for window in sorted(windows)}
        self._window = self._best = -1
        self._trying = self._settled = False
        self._seconds = self._tried_seconds = 0.0
        self._since_try, self._patience = 0, 1

    def choose(self) -> int:
        """The window with the most tokens a second, as far as is known; or another, to know
        more."""
        window, trying = self._next()
        self._settled &= window == self._window
        self._window, self._trying = window, trying
        return window

    def is_due(self, window: int) -> bool:
        """Whether the time of a slice with this window should be taken. While it is, the host
        does not work beside the device, so it is not always."""
        return self._trying or self._seen[window].untimed >= TIMED_EVERY - 1

    def forwards(self, slice_of: int) -> int:
        """Forwards that the chosen window is decoded with, in a slice of so many."""
        return min(TRY_FORWARDS, slice_of) if self._trying else slice_of

    def rate(self, window: int) -> float:
        """Tokens a second of one row; 0 of a window that was never timed."""
        return self._seen[window].rate

    def observe(
        self,
        window: int,
        *,
        tokens: int,
        row_forwards: int,
        forwards: int,
        seconds: float | None,
    ) -> None:
        """Learns from a slice.

        Args:
          tokens: committed by all rows.
          row_forwards: forwards that the rows took part in, added up, at least 1.
          forwards: of the batch, at least 1.
          seconds: that it took; None where its time was not taken.
        """
        seen = self._seen[window]
        spent = forwards * seen.cost if seconds is None else seconds
        self._seconds += spent
        self._tried_seconds += spent * self._trying
        if not self._settled:
            # A new window is empty, and its first forward commits nothing.
            self._settled = True
            return
        memory = TRY_MEMORY if self._trying else MEMORY
        seen.count(tokens, row_forwards, memory)
        if seconds is not None:
            seen.time(seconds, forwards, memory)
        if self._first_try() is None:
            self._decide(tried=self._trying and seconds is not None)

    def _next(self) -> tuple[int, bool]:
        """The window to choose, and whether that is a try."""
        first = self._first_try()
        if first is not None:
            return first, True
        if self._trying and self._window != self._best:
            return self._window, True  # nothing has been learnt of it yet
        other = self._most_interesting()
        after = self._tried_seconds + 2 * TRY_FORWARDS * self._seen[other].cost
        is_time = self._since_try >= TRY_EVERY * self._patience
        if other != self._best and is_time and after <= TRY_SHARE * self._seconds:
            return other, True
        return self._best, False

    def _decide(self, tried: bool) -> None:
        """Says which window is best by now; if it stays, others are tried less often."""
        best = max(self._known(), key=self._promise)
        self._since_try = 0 if tried else self._since_try + 1
        if best != self._best:
            self._best, self._patience = best, 1
        elif tried:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        if tried:
            self._trying = False

    def _known(self) -> list[int]:
        return [w for w, seen in self._seen.items() if seen.timed_forwards >= FIRST_FORWARDS]

    def _first_try(self) -> int | None:
        """The narrowest window that is not known, if its neighbour promises: of all widths one is
        best, and on both sides of it they get worse."""
        known = self._known()
        unknown = [window for window in self._seen if window not in known]
        if known and self.rate(known[-1]) < PROMISING * max(map(self.rate, known)):
            return None
        return unknown[0] if unknown else None

    def _promise(self, window: int) -> float:
        return self.rate(window) * (1 if window else MARGIN)

    def _most_interesting(self) -> int:
        """The least tried of the promising windows, or of all where none promises."""
        others = [window for window in self._known() if window != self._best]
        worth = [w for w in others if self.rate(w) > PROMISING * self.rate(self._best)]
        return min(worth or others, key=lambda w: self._seen[w].slices, default=self._best)


class _Seen:
    """What slices of one window committed and took, added up with a fading past."""

    def __init__(self, window: int):
        self._autoregressive = window == 0
        self._tokens = self._row_forwards = self._seconds = self._forwards = 0.0
        self.slices, self.untimed, self.timed_forwards = 0, TIMED_EVERY, 0

    def count(self, tokens: int, row_forwards: int, memory: float) -> None:
        self._tokens = memory * self._tokens + tokens
        self._row_forwards = memory * self._row_forwards + row_forwards
        self.slices += 1
        self.untimed += 1

    def time(self, seconds: float, forwards: int, memory: float) -> None:
        if self.timed_forwards >= FIRST_FORWARDS:
            usual = self.cost * forwards
            seconds = min(max(seconds, usual / MOST_SURPRISE), usual * MOST_SURPRISE)
        self._seconds = memory * self._seconds + seconds
        self._forwards = memory * self._forwards + forwards
        self.timed_forwards += forwards
        self.untimed = 0

    @property
    def cost(self) -> float:
        """Seconds of a forward; 0 where no time was taken."""
        return self._seconds / self._forwards if self._forwards else 0.0

    @property
    def rate(self) -> float:
        if not self._seconds:
            return 0.0
        tokens = 1.0 if self._autoregressive else self._tokens / self._row_forwards
        return tokens / self.cost
