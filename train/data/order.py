"""The order in which steps read packed rows: the one file that knows grain.

Step s's global batch is rows ``s * A * R`` and on of one endless order that only the seed, the
sources and their weights decide (in each phase of a run: `train.recipe.phases`), where no batch is
skipped (`train.recipe.skipped_batches`). So a batch is the
same for any number of hosts, each of which reads its own rows of it, and a run that resumes needs
nothing but the number of its step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np
from absl import flags

from train.recipe.skipped_batches import NONE_SKIPPED, SkippedBatches
from wedlm_jax.errors import InputError

HostBatch = dict[str, np.ndarray]


class RowSet(Protocol):
    """Gives rows by number: the fields of `wedlm_jax.corruption.PackedRows`, ``[L]`` each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    def place(self, index: int) -> tuple[str, int]:
        """Finds the file that holds row ``index``, and its number there, from 0."""


class RowPlaces:
    """Stands in for a row set: element i is the place of row i, which is not read.

    An order of these tells where the rows of the same order of the sets themselves stand.
    """

    def __init__(self, rows: RowSet):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> tuple[str, int]:
        return self._rows.place(int(index))


class RowsOfSource:
    """Adds to each row of a set which of a run's sources it is of, as bool ``[S]``.

    Args:
      rows: the set.
      number: of the source.
      sources: S.
    """

    def __init__(self, rows: RowSet, number: int, sources: int):
        self._rows, self._source = rows, np.arange(sources) == number

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return self._rows[int(index)] | {"source": self._source}

    def __repr__(self) -> str:
        return f"RowsOfSource({self._rows!r}, {int(self._source.argmax())})"

    def place(self, index: int) -> tuple[str, int]:
        """Finds a row's file, and its number there."""
        return self._rows.place(index)


class Stream(NamedTuple):
    """Describes the endless sequence of one set's rows, and where an order goes on with it.

    Attributes:
      number: tells the streams of a run apart; with the seed, it decides the sequence.
      taken: rows that were read of it before.
    """

    number: int
    taken: int = 0


def rows_taken(weights: Sequence[float], rows: int) -> list[int]:
    """Counts how many of the first ``rows`` rows of a mix come from each of its sets."""
    if len(weights) == 1:
        return [rows]
    places = [
        grain.MapDataset.range(sys.maxsize).map(lambda row, number=number: (number, row))
        for number in range(len(weights))
    ]
    mixed = grain.MapDataset.mix(places, weights)
    last: dict[int, int] = {}
    for index in range(rows - 1, -1, -1):
        number, row = mixed[index]
        last.setdefault(number, row)
        if len(last) == len(weights):
            break
    return [last.get(number, -1) + 1 for number in range(len(weights))]


def check_rows(row_sets: Sequence[tuple[Sized, float]], batch_rows: int) -> None:
    """Refuses sets that together have fewer rows than one batch takes."""
    rows = sum(len(row_set) for row_set, _ in row_sets)
    if rows < batch_rows:
        raise InputError(f"data: {rows} packed rows are fewer than one batch of {batch_rows}")


def global_order(
    row_sets: Sequence[tuple[RowSet | RowPlaces, float]],
    *,
    seed: int,
    batch_rows: int,
    streams: Sequence[Stream] | None = None,
) -> grain.MapDataset:
    """Yields all rows, each set shuffled anew every epoch of its own, mixed by weight, without end.

    Args:
      row_sets: rows and their share of the order; shares are relative to their sum.
      seed: decides the order.
      batch_rows: rows in a step's global batch, A * R.
      streams: where the order goes on with each set; default: at the beginning of each.

    Raises:
      InputError: there are fewer rows than one batch takes.
    """
    check_rows(row_sets, batch_rows)
    orders = []
    for (row_set, _), stream in zip(
        row_sets, streams or map(Stream, range(len(row_sets))), strict=True
    ):
        source = grain.MapDataset.source(row_set)  # type: ignore[arg-type]
        order = source.seed(seed + stream.number).shuffle().repeat()
        orders.append(order[stream.taken :] if stream.taken else order)
    if len(orders) == 1:
        return orders[0]
    return grain.MapDataset.mix(orders, [weight for _, weight in row_sets])


class HostSteps:
    """Gives this host's share of step ``start + i`` as element i: arrays ``[A, len(rows), ...]``,
    each with the last axis that it has in a row.

    Args:
      order: as from `global_order`.
      shape: (A, R) of a global batch.
      rows: which of the R rows this host holds, ascending.
      start, stop: the first step, and the one after the last.
      first: the step with which the order begins.
      skipped: batches of the order that no step reads.
    """

    def __init__(
        self,
        order: grain.MapDataset,
        shape: tuple[int, int],
        rows: Sequence[int],
        start: int,
        stop: int,
        first: int = 0,
        skipped: SkippedBatches = NONE_SKIPPED,
    ):
        self._order, self._shape, self._rows = order, shape, [int(row) for row in rows]
        self._start, self._stop, self._first = start, stop, first
        self._skipped = skipped

    def __len__(self) -> int:
        return max(self._stop - self._start, 0)

    def __getitem__(self, index: Any) -> HostBatch:
        accumulation, batch_rows = self._shape
        # Steps are counted from 0 here, so that the batch of step s is the s + 1st of the run.
        batch = self._skipped.between(self._first, self._start + int(index) + 1) - 1
        first = batch * accumulation * batch_rows
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
    row_sets: Sequence[tuple[RowSet, float]],
    *,
    seed: int,
    shape: tuple[int, int],
    batch: int,
    streams: Sequence[Stream] | None = None,
) -> list[list[tuple[str, int]]]:
    """Finds the rows of a global batch: the file and the number there, for ``[A][R]``.

    Args:
      row_sets, seed, streams: as in `global_order`.
      shape: (A, R).
      batch: from 0, the order's first.
    """
    places = [(RowPlaces(rows), weight) for rows, weight in row_sets]
    accumulation, batch_rows = shape
    order = global_order(places, seed=seed, batch_rows=accumulation * batch_rows, streams=streams)
    first = batch * accumulation * batch_rows
    return [
        [order[first + turn * batch_rows + row] for row in range(batch_rows)]
        for turn in range(accumulation)
    ]


def read_ahead(steps: HostSteps, *, workers: int, prefetch: int) -> Iterator[HostBatch]:
    """Yields steps in order, each read before it is asked for.

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
