"""The order in which steps read packed rows: the one file that knows grain.

Step s's global batch is rows ``s * A * R`` and on of one endless order that only the seed, the
sources and their weights decide. So a batch is the same for any number of hosts, each of which
reads its own rows of it, and a run that resumes needs nothing but the number of its step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags

from wedlm_jax.errors import InputError

HostBatch = dict[str, np.ndarray]


class RowSet(Protocol):
    """Packed rows by number: the fields of `wedlm_jax.corruption.PackedRows`, ``[L]`` each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    def place(self, index: int) -> tuple[str, int]:
        """Finds the file that holds row ``index``, and its number there, from 0."""


class RowPlaces:
    """In the stead of a row set: element i is the place of row i, which is not read.

    An order of these tells where the rows of the same order of the sets themselves stand.
    """

    def __init__(self, rows: RowSet):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> tuple[str, int]:
        return self._rows.place(int(index))


def global_order(
    row_sets: Sequence[tuple[RowSet | RowPlaces, float]], *, seed: int, batch_rows: int
) -> grain.MapDataset:
    """Yields all rows, each set shuffled anew every epoch of its own, mixed by weight, without end.

    Args:
      row_sets: rows and their share of the order; shares are relative to their sum.
      seed: decides the order.
      batch_rows: rows in a step's global batch, A * R.

    Raises:
      InputError: there are fewer rows than one batch takes.
    """
    rows = sum(len(row_set) for row_set, _ in row_sets)
    if rows < batch_rows:
        raise InputError(f"data: {rows} packed rows are fewer than one batch of {batch_rows}")
    orders = [
        grain.MapDataset.source(row_set).seed(seed + number).shuffle().repeat()  # type: ignore[arg-type]
        for number, (row_set, _) in enumerate(row_sets)
    ]
    if len(orders) == 1:
        return orders[0]
    return grain.MapDataset.mix(orders, [weight for _, weight in row_sets])


class HostSteps:
    """Number i is this host's share of step ``start + i``: arrays ``[A, len(rows), L]``.

    Args:
      order: as from `global_order`.
      shape: (A, R) of a global batch.
      rows: which of the R rows this host holds, ascending.
      start, stop: the first step, and the one after the last.
    """

    def __init__(
        self,
        order: grain.MapDataset,
        shape: tuple[int, int],
        rows: Sequence[int],
        start: int,
        stop: int,
    ):
        self._order, self._shape, self._rows = order, shape, [int(row) for row in rows]
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return max(self._stop - self._start, 0)

    def __getitem__(self, index: Any) -> HostBatch:
        accumulation, batch_rows = self._shape
        first = (self._start + int(index)) * accumulation * batch_rows
        picked = [
            self._order[first + turn * batch_rows + row]
            for turn in range(accumulation)
            for row in self._rows
        ]
        leading = (accumulation, len(self._rows))
        return {
            name: np.stack([row[name] for row in picked]).reshape(*leading, -1)
            for name in picked[0]
        }

    def __repr__(self) -> str:
        return f"HostSteps({self._start}, {self._stop})"


def step_places(
    row_sets: Sequence[tuple[RowSet, float]], *, seed: int, shape: tuple[int, int], step: int
) -> list[list[tuple[str, int]]]:
    """Finds the rows of a step's global batch: the file and the number there, for ``[A][R]``.

    Args:
      row_sets, seed: as in `global_order`.
      shape: (A, R).
      step: from 0.
    """
    places = [(RowPlaces(rows), weight) for rows, weight in row_sets]
    accumulation, batch_rows = shape
    order = global_order(places, seed=seed, batch_rows=accumulation * batch_rows)
    first = step * accumulation * batch_rows
    return [
        [order[first + turn * batch_rows + row] for row in range(batch_rows)]
        for turn in range(accumulation)
    ]


def read_ahead(steps: HostSteps, *, workers: int, prefetch: int) -> Iterator[HostBatch]:
    """Steps in order, each read before it is asked for.

    Args:
      steps: what to read.
      workers: processes that read, whole steps by turns; 0 reads in threads of this one.
      prefetch: steps that wait ready, at least 1.
    """
    source = grain.MapDataset.source(steps)  # type: ignore[arg-type]
    if not workers:
        options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
        return iter(source.to_iter_dataset(options))
    # Grain asks absl for a flag of its own; a program that is no absl app has parsed none.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    one = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    processes = grain.MultiprocessingOptions(
        num_workers=workers, per_worker_buffer_size=math.ceil(prefetch / workers)
    )
    return iter(source.to_iter_dataset(one).mp_prefetch(processes))
