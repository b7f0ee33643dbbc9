"""Batches that a run leaves out, as one does after a spike of the loss: `data.skip`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from wedlm_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class SkippedBatches:
    """Maps steps to the batches that they read.

    Batches are numbered from 1 in the order of the data, whatever is skipped: batch N is the one
    that step N reads where nothing is. A step that would read a skipped one reads the next that
    is not.

    Attributes:
      ranges: the first and the last batch of each, ascending, and not adjacent.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Sequence[Any]) -> SkippedBatches:
        """Makes them from a recipe's ``data.skip``, in any order.

        Raises:
          InputError: one is no range, or two overlap.
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
                raise InputError(f"data.skip: two ranges have batch {first:,}")
            if joined and first == joined[-1][1] + 1:
                first, _ = joined.pop()
            joined.append((first, last))
        return cls(tuple(joined))

    def batch(self, step: int) -> int:
        """Returns the number of the batch that ``step``, counted from 1, reads; 0 of step 0."""
        return step + sum(last - first + 1 for first, last in self.passed(step))

    def passed(self, step: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges that lie before the batch of ``step``, counted from 1."""
        batch, count = step, 0
        for first, last in self.ranges:
            if not step or batch < first:
                break
            batch, count = batch + last - first + 1, count + 1
        return self.ranges[:count]

    def passed_by(self, step: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges between the batches of ``step`` and of the step before."""
        return self.passed(step)[len(self.passed(step - 1)) :]

    def between(self, first: int, step: int) -> int:
        """Counts the batches, skipped ones too, from after that of step ``first`` to that of
        ``step``: where the latter stands in an order that begins after step ``first``."""
        return self.batch(step) - self.batch(first)


NONE_SKIPPED = SkippedBatches()
