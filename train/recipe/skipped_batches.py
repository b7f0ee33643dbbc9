"""Batches that a run skips, for example after a loss spike: `data.skip`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from wedlm_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class SkippedBatches:
    """Maps steps to the batches that they read.

    Batches are numbered from 1 in the order of the data, whatever is skipped: batch N is the one
    that step N reads if nothing is skipped. A step that would read a skipped batch reads the next
    one that is not skipped.

    Attributes:
      ranges: the first and the last batch of each skipped range, ascending and not adjacent.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Sequence[Any]) -> SkippedBatches:
        """Creates this from the ranges of a recipe's ``data.skip``, which may be in any order.

        Raises:
          InputError: an entry is not a range, or two ranges overlap.
        """
        for number, one in enumerate(ranges):
            if len(one) != 2 or not 1 <= one[0] <= one[1]:
                raise InputError(
                    f"data.skip[{number}] must be [from, to], the first and the last batch to "
                    f"skip, counted from 1, not {list(one)}"
                )
        joined: list[tuple[int, int]] = []
        for first, last in sorted(map(tuple, ranges)):
            if joined and first <= joined[-1][1]:
                raise InputError(f"data.skip: two ranges contain batch {first:,}")
            if joined and first == joined[-1][1] + 1:
                first, _ = joined.pop()
            joined.append((first, last))
        return cls(tuple(joined))

    def batch(self, step: int) -> int:
        """Returns the number of the batch that ``step``, counted from 1, reads; 0 for step 0."""
        return step + sum(last - first + 1 for first, last in self.passed(step))

    def passed(self, step: int) -> tuple[tuple[int, int], ...]:
        """Returns the skipped ranges before the batch of ``step``, counted from 1."""
        batch, count = step, 0
        for first, last in self.ranges:
            if not step or batch < first:
                break
            batch, count = batch + last - first + 1, count + 1
        return self.ranges[:count]

    def passed_by(self, step: int) -> tuple[tuple[int, int], ...]:
        """Returns the skipped ranges between the batches of ``step`` and of the step before it."""
        return self.passed(step)[len(self.passed(step - 1)) :]

    def between(self, first: int, step: int) -> int:
        """Counts the batches, skipped ones included, after that of step ``first`` up to that of
        ``step``: the place of the latter in an order that begins after step ``first``."""
        return self.batch(step) - self.batch(first)
