"""How wide a window pays: wide while the device waits for memory, narrow when it computes.

Tokens a second of a batch are, for a window W,

    active rows * tokens per row and forward (W) / seconds per forward (W),

and both are learnt from the prompts themselves, since both depend on them: how many tokens a
forward commits on the text, what it costs on how many slots are filled and how long the texts
are. An autoregressive row commits one, always. So nothing is decoded only to be measured: a
batch begins with a few forwards autoregressively, then a few at each wider window, as long as
they keep promising; then it stays with the best, and seldom looks at another.
"""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 0.9
"""Weight of the past where slices are added up."""
MARGIN = 1.05
"""A window has to promise so many times the speed of autoregressive decoding to be chosen."""
MOST_SURPRISE = 3.0
"""A forward counts for at most so many times what was measured before: what else a machine does
makes some far too slow."""

TIMED_EVERY = 16
"""Slices of a window until the time of one is taken again."""

TRY_FORWARDS = 8
"""Forwards of a window that is only tried: what stood filled before it is committed in the first
ones."""
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
    """Chooses the window of a batch's next slice.

    Args:
      windows: those that may be chosen, 0 among them.
    """

    def __init__(self, windows: Sequence[int]):
        self._seen = {window: _Seen(window) for window in sorted(windows)}
        self._best, self._trying = -1, False
        self._seconds = self._tried_seconds = 0.0
        self._since_try, self._patience = 0, 1

    def choose(self) -> int:
        """The window with the most tokens a second, as far as is known; or another, to know
        more."""
        first = self._first_try()
        if first is not None:
            self._trying = True
            return first
        best = max(self._known(), key=self._promise)
        if best != self._best:
            self._best, self._patience = best, 1
        elif self._trying:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        other = self._most_interesting()
        self._trying = other != best and self._may_try(other)
        self._since_try = 0 if self._trying else self._since_try + 1
        return other if self._trying else best

    def is_due(self, window: int) -> bool:
        """Whether the time of a slice with this window should be taken. While it is, the host
        does not work beside the device, so it is not always."""
        return self._trying or self._seen[window].untimed >= TIMED_EVERY

    def forwards(self, slice_of: int) -> int:
        """Forwards that the chosen window is decoded with, in a slice of so many."""
        return min(TRY_FORWARDS, slice_of) if self._trying else slice_of

    def rate(self, window: int) -> float:
        """Tokens a second of one row."""
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
        seen.count(tokens, row_forwards)
        if seconds is not None:
            seen.time(seconds, forwards)
        spent = forwards * seen.cost
        self._seconds += spent
        self._tried_seconds += spent * self._trying

    def _known(self) -> list[int]:
        return [window for window, seen in self._seen.items() if seen.forwards]

    def _first_try(self) -> int | None:
        """The narrowest window that was never timed, if its neighbour promises: of all widths
        one is best, and on both sides of it they get worse."""
        known = self._known()
        unknown = [window for window in self._seen if window not in known]
        if known and self.rate(known[-1]) < PROMISING * max(map(self.rate, known)):
            return None
        return unknown[0] if unknown else None

    def _promise(self, window: int) -> float:
        return self.rate(window) * (1 if window else MARGIN)

    def _most_interesting(self) -> int:
        """The least tried of the promising windows, or the best of those that are not."""
        others = [window for window in self._known() if window != self._best]
        worth = [w for w in others if self.rate(w) > PROMISING * self.rate(self._best)]
        if worth:
            return min(worth, key=lambda w: self._seen[w].slices)
        return max(others, key=self.rate, default=self._best)

    def _may_try(self, window: int) -> bool:
        after = self._tried_seconds + TRY_FORWARDS * self._seen[window].cost
        return after <= TRY_SHARE * self._seconds and self._since_try >= TRY_EVERY * self._patience


class _Seen:
    """What slices of one window committed and took, added up with a fading past."""

    def __init__(self, window: int):
        self._autoregressive = window == 0
        self._tokens = self._row_forwards = self._seconds = self.forwards = 0.0
        self.slices, self.untimed = 0, TIMED_EVERY

    def count(self, tokens: int, row_forwards: int) -> None:
        self._tokens = MEMORY * self._tokens + tokens
        self._row_forwards = MEMORY * self._row_forwards + row_forwards
        self.slices += 1
        self.untimed += 1

    def time(self, seconds: float, forwards: int) -> None:
        if self.forwards:
            seconds = min(seconds, MOST_SURPRISE * self.cost * forwards)
        self._seconds = MEMORY * self._seconds + seconds
        self.forwards = MEMORY * self.forwards + forwards
        self.untimed = 0

    @property
    def cost(self) -> float:
        """Seconds of a forward; 0 where no time was taken."""
        return self._seconds / self.forwards if self.forwards else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second of one row."""
        tokens = 1.0 if self._autoregressive else self._tokens / self._row_forwards
        return tokens / self.cost
