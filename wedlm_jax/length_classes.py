"""Rows of several lengths: prompts of like length decode together, so that short ones do not pay
for long ones.

All rows of a batch have equally much cache. Where some prompts need much more than others, one
batch for all would give every row what the longest needs, and the memory would hold few rows. So
prompts are sorted into classes, each twice as long as the one before (the last as long as the
longest prompt), and a batch takes those of one class: many short rows or few long ones, in the same
memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wedlm_jax.batch_sizes import largest_cache, smallest_cache
from wedlm_jax.sharding import shards

if TYPE_CHECKING:
    from wedlm_jax.engine import Engine

SMALLEST_CLASS = 64
"""Rows of cache that the shortest class has, at least; more where a window is wide."""


@dataclasses.dataclass(frozen=True)
class LengthClass:
    """Prompts that decode together.

    Attributes:
      cache_size: rows of cache that each has; None, where there is one class for all, for as many
        as those that are known need.
      rows: how many of them, at most.
    """

    cache_size: int | None
    rows: int


def engine_classes(
    engine: Engine, rows: int, max_cache_tokens: int | None
) -> tuple[LengthClass, ...]:
    """`length_classes` for all prompts that an engine takes, on the mesh in use."""
    smallest = SMALLEST_CLASS
    # What stands behind a text is as long as the window: a class below that holds no prompt.
    while smallest < smallest_cache(engine):
        smallest *= 2
    return length_classes(
        rows, largest_cache(engine), max_cache_tokens,
        multiple=shards("batch"), smallest=smallest,
    )  # fmt: skip


def length_classes(
    rows: int,
    largest: int,
    max_cache_tokens: int | None = None,
    *,
    multiple: int = 1,
    smallest: int = SMALLEST_CLASS,
) -> tuple[LengthClass, ...]:
    """The classes, shortest first. The first is as long as ``rows`` rows may be; from there the
    length doubles and the rows halve, up to the longest prompt.

    Args:
      rows: prompts that decode together, at most.
      largest: rows of cache of the longest prompt that can come.
      max_cache_tokens: rows of cache of all prompts of a batch together, at least ``multiple``
        times ``largest``; None for as many as ``rows`` of the longest need, and one class.
      multiple: of which a batch's rows are one, as on a mesh those of its shards.
      smallest: rows of cache that a prompt of the first class has, at least.
    """
    if max_cache_tokens is None:
        return (LengthClass(None, rows),)
    rows = -(-rows // multiple) * multiple
    size = smallest
    while 2 * size * rows <= max_cache_tokens:
        size *= 2
    sizes = []
    while size < largest:
        sizes.append(size)
        size *= 2
    if not sizes:
        return (LengthClass(None, min(rows, max_cache_tokens // largest // multiple * multiple)),)
    return tuple(
        LengthClass(each, min(rows, max_cache_tokens // each // multiple * multiple))
        for each in (*sizes, largest)
    )


def class_of(cache_size: int, classes: Sequence[LengthClass]) -> int:
    """The number of the shortest class that has room for so many rows of cache."""
    for number, each in enumerate(classes):
        if each.cache_size is None or cache_size <= each.cache_size:
            return number
    raise ValueError(f"{cache_size} rows of cache are more than {classes[-1].cache_size}")
