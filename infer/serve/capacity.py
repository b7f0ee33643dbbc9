"""How many sequences may be under way: those that decode, and a bounded queue of waiting ones."""

from __future__ import annotations

import collections
import math
import time

from infer.serve.errors import ApiError

LONGEST_RETRY = 60
"""Seconds that a caller is asked to wait, at most."""


class Capacity:
    """Counts sequences in and out.

    Args:
      running: sequences that decode together.
      queued: how many more may wait.
    """

    def __init__(self, running: int, queued: int):
        self._most = running + queued
        self._open = 0
        self._ends: collections.deque[float] = collections.deque(maxlen=64)

    @property
    def is_idle(self) -> bool:
        return self._open == 0

    def check(self, count: int) -> None:
        """Refuses a call of more sequences than there will ever be places.

        Raises:
          ApiError: 400.
        """
        if count > self._most:
            raise ApiError(
                400, f"{count} completions are asked for; this server takes {self._most} at most"
            )

    def enter(self, count: int) -> None:
        """Counts sequences in.

        Raises:
          ApiError: 429 with Retry-After, if there is no room for all of them now.
        """
        excess = self._open + count - self._most
        if excess > 0:
            seconds = self._seconds_until(excess)
            raise ApiError(
                429,
                f"all places are taken, those of the queue too; try again in {seconds} s",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self._open += count

    def leave(self, count: int) -> None:
        """Counts sequences out."""
        self._open -= count
        self._ends.extend([time.monotonic()] * count)

    def _seconds_until(self, excess: int) -> int:
        """Estimates the seconds until this many sequences will have finished, from the rate of the
        last ones."""
        if len(self._ends) < 2:
            return 1
        passed = time.monotonic() - self._ends[0]
        return max(1, min(LONGEST_RETRY, math.ceil(excess * passed / len(self._ends))))
