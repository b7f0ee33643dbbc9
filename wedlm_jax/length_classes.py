"""Rows of several lengths: prompts of like length decode together, so that short ones do not pay
for long ones.

All rows of a batch have equally much cache. Where some prompts need much more than others, one
batch for all would give every row what the longest needs, and the memory would hold few rows. So
prompts are sorted into classes, each twice as long as the one before, and a batch takes those of
one class: many short rows or few long ones, in the same memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

SMALLEST_CLASS = 64
"""Rows of cache that the shortest class has, at least."""


@dataclasses.dataclass(frozen=True)
class LengthClass:
    """Prompts that decode together.

    Attributes:
      cache_size: rows of cache that each has, at most.
      rows: how many of them, at most.
    """

    cache_size: int
    rows: int


def length_classes(
    rows: int, largest: int, max_cache_tokens: int | None = None
) -> tuple[LengthClass, ...]:
    """The classes, shortest first. The first is as long as ``rows`` rows may be; from there the
    length doubles and the rows halve, up to the longest prompt.

    Args:
      rows: prompts that decode together, at most.
      largest: rows of cache of the longest prompt that can come.
      max_cache_tokens: rows of cache of all prompts of a batch together, at least ``largest``; None
        for as many as ``rows`` of the longest need, and one class.
    """
    if max_cache_tokens is None:
        return (LengthClass(largest, rows),)
    size = SMALLEST_CLASS
    while 2 * size * rows <= max_cache_tokens:
        size *= 2
    classes = []
    while size < largest:
        classes.append(LengthClass(size, min(rows, max_cache_tokens // size)))
        size *= 2
    return (*classes, LengthClass(largest, min(rows, max_cache_tokens // largest)))


def class_of(cache_size: int, classes: Sequence[LengthClass]) -> int:
    """The number of the shortest class that has room for so many rows of cache; the last takes
    what is longer than all."""
    for number, each in enumerate(classes):
        if cache_size <= each.cache_size:
            return number
    return len(classes) - 1
