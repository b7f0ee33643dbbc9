"""How wide a window pays: wide while the device waits for memory, narrow when it computes.

Tokens a second of a batch are, for a window W,

    active rows * tokens per row and forward (W) / seconds per forward (W).

The seconds come from a table that is measured on the batch before it decodes, and from what
it takes since. How many tokens a forward commits depends on the text, and is learnt while it
is decoded: what was seen at one width scales the expectation for the others. An
autoregressive row commits one, always.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

import numpy as np

from wedlm_jax.batch import Batch
from wedlm_jax.sampling import SamplingParams

MEMORY = 0.9
"""Weight of the past where what slices committed is added up."""
MARGIN = 1.05
"""A window has to promise so many times the speed of autoregressive decoding to be chosen."""
COSTS_KEPT = 5
"""Measured costs of a window whose median counts: what else a machine does makes some too high."""

TIMED_EVERY = 8
"""Slices of a window until the time of one is taken again."""

TRY_SHARE = 0.04
"""Share of the time that may go into windows which are not the best as far as is known."""
TRY_EVERY = 8
"""Slices from one try to the next, at least: each change of width costs something, too."""
MOST_PATIENCE = 32
"""Slices between tries grow to so many times `TRY_EVERY`, twice as many each time that a try has
changed nothing."""
TRY_FORWARDS = 8
"""Forwards of such a try: what stood filled before it is committed in the first ones."""
PROMISING = 0.6
"""A window with so much of the best one's expected speed is worth a try."""

TIMED_FORWARDS = (1, 9)
"""The seconds of so many forwards are taken, and their difference counts: what comes before and
after a slice costs more than a forward of a small model."""
TIMED_ROUNDS = 3
ENOUGH_SECONDS = 0.5
"""No further round of a window when it has taken so long already."""


class WidthPolicy:
    """Chooses the window of a batch's next slice.

    Args:
      costs: seconds of a forward for each window that may be chosen.
    """

    def __init__(self, costs: dict[int, float]):
        self._costs = dict(costs)
        self._measured = {w: deque([cost], COSTS_KEPT) for w, cost in costs.items()}
        self._seen: dict[int, tuple[float, float]] = {0: (1.0, 1.0)}
        """Tokens and forwards of rows, each added up with a fading past."""
        self._tries = dict.fromkeys(costs, 0)
        self._untimed = dict.fromkeys(costs, TIMED_EVERY)
        """Slices since the last whose time was taken."""
        self._seconds = self._tried_seconds = 0.0
        self._trying, self._since_try, self._patience = False, 0, 1
        self._best: int | None = None

    def choose(self) -> int:
        """The window with the most tokens a second, as far as is known; now and then another,
        to know more."""
        best = max(self._costs, key=self._promise)
        if best != self._best:
            self._best, self._patience = best, 1
        elif self._trying:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        others = [window for window in self._costs if window != best]
        worth = [w for w in others if self.rate(w) > PROMISING * self.rate(best)]
        # The least known of the promising ones, or the most promising of the others.
        other = (
            min(worth, key=lambda w: self._tries[w])
            if worth
            else max(others, key=self.rate, default=best)
        )
        after = self._tried_seconds + TRY_FORWARDS * self._costs[other]
        self._trying = (
            other != best
            and after <= TRY_SHARE * self._seconds
            and self._since_try >= TRY_EVERY * self._patience
        )
        self._since_try = 0 if self._trying else self._since_try + 1
        return other if self._trying else best

    def is_due(self, window: int) -> bool:
        """Whether the time of a slice with this window should be taken again. While it is, the
        host does not work beside the device, so it is not always."""
        return self._untimed[window] >= TIMED_EVERY

    def forwards(self, slice_of: int) -> int:
        """Forwards that the chosen window is decoded with, in a slice of so many."""
        return min(TRY_FORWARDS, slice_of) if self._trying else slice_of

    def rate(self, window: int) -> float:
        """Tokens a second of one row."""
        return self._tokens(window) / self._costs[window]

    def _promise(self, window: int) -> float:
        return self.rate(window) * (1 if window else MARGIN)

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
          seconds: of one forward; None where it was not taken.
        """
        self._tries[window] += 1
        self._untimed[window] += 1
        if window:
            past, past_forwards = self._seen.get(window, (0.0, 0.0))
            self._seen[window] = MEMORY * past + tokens, MEMORY * past_forwards + row_forwards
        if seconds is not None:
            self._untimed[window] = 0
            self._measured[window].append(seconds)
            self._costs[window] = statistics.median(self._measured[window])
        spent = forwards * self._costs[window]
        self._seconds += spent
        self._tried_seconds += spent * self._trying

    def _tokens(self, window: int) -> float:
        """Tokens that a row commits in a forward: as seen, or as the nearest seen window lets
        expect."""
        others = [w for w in self._seen if w]
        if window in self._seen or not others:
            tokens, forwards = self._seen.get(window, (expected_tokens(window), 1.0))
            return tokens / forwards
        near = min(others, key=lambda w: abs(math.log(w / window)))
        return max(self._tokens(near) * expected_tokens(window) / expected_tokens(near), 0.1)


def expected_tokens(window: int) -> float:
    """Before anything is seen: 2 tokens at W = 4, and 0.6 more with each doubling."""
    return 1.0 if window == 0 else max(2.0 + 0.6 * math.log2(window / 4), 1.0)


def measure_costs(batch: Batch) -> dict[int, float]:
    """Seconds of a forward of a batch whose rows are all free, for each of its windows; infinite
    behind a window that cannot pay even if each forward filled all of it.

    Every row decodes a made-up text, one token a forward. Of several rounds the fastest counts:
    what else the machine does only makes it slower. The first forward at each width compiles,
    and is not counted. No row is left running.
    """
    costs: dict[int, float] = {}
    hopeless = False
    for window in batch.windows:
        costs[window] = math.inf if hopeless else _measure_cost(batch, window)
        hopeless |= window > 0 and costs[window] > window * costs.get(0, math.inf)
    batch.set_windows(batch.windows[-1])
    return costs


def _measure_cost(batch: Batch, window: int) -> float:
    rows = range(batch.sizes.rows)
    few, many = TIMED_FORWARDS
    params = SamplingParams(
        max_tokens=batch.sizes.max_output, entropy_threshold=None, ignore_eos=True
    )
    assert 1 + few + many <= params.max_tokens, "it ends too early"

    def seconds(forwards: int) -> float:
        started = time.perf_counter()
        batch.dispatch(forwards)
        batch.look()
        return time.perf_counter() - started

    batch.set_windows(window)
    times: list[tuple[float, float]] = []
    while len(times) < TIMED_ROUNDS and sum(map(sum, times)) < ENOUGH_SECONDS:
        batch.admit(rows, [np.ones(1, np.int32)] * len(rows), [params] * len(rows))
        batch.advance(1)
        times.append((seconds(few), seconds(many)))
        batch.finish(*rows)
    shortest, longest = map(min, zip(*times, strict=True))
    return max(longest - shortest, 1e-3 * longest) / (many - few)
