"""The order in which steps read packed rows: the one file that knows grain.

Step s's global batch is rows ``s * A * R`` and on of one endless order that only the seed, the
sources and their weights decide (in each phase of a run: `train.recipe.phases`), where no batch is
skipped (`train.recipe.skipped_batches`). So a batch is the
same for any number of hosts, each of which reads its own rows of it, and a run that resumes needs
nothing but the number of its step.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np
from absl import flags

from train.recipe.skipped_batches import NONE_SKIPPED, SkippedBatches
from wedlm_jax.errors import InputError
from wedlm_jax.packing import prediction_blocks

HostBatch = dict[str, np.ndarray]


class RowSet(Protocol):
    """Gives rows by number: the fields of `wedlm_jax.corruption.PackedRows`, ``[L]`` each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    def place(self, index: int) -> tuple[str, int]:
        """Finds the file that holds row ``index``, and its number there, from 0."""


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
    row_sets: Sequence[tuple[Sized, float]],
    *,
    seed: int,
    batch_rows: int,
    streams: Sequence[Stream] | None = None,
) -> grain.MapDataset:
    """Yields all rows, each set reshuffled in every epoch of its own, mixed by weight, without end:
    the number of a row's set here, and its own in the set.

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
    for number, (row_set, _) in enumerate(row_sets):
        stream = streams[number] if streams else Stream(number)
        order = grain.MapDataset.range(len(row_set)).seed(seed + stream.number).shuffle().repeat()
        order = order[stream.taken :] if stream.taken else order
        orders.append(order.map(functools.partial(_of_set, number)))
    if len(orders) == 1:
        return orders[0]
    return grain.MapDataset.mix(orders, [weight for _, weight in row_sets])


def _of_set(number: int, row: int) -> tuple[int, int]:
    return number, int(row)


class StepRows:
    """The rows that the steps of a phase read, and where they are stored.

    Args:
      row_sets: as in `global_order`.
      seed, streams: likewise.
      shape: (A, R) of a global batch.
      first: the step with which the order begins.
      skipped: batches of the order that no step reads.
      sources: how many sets of rows the run has, those of other phases too, by the numbers of
        their streams. Where there are several each row tells its own, as bool ``[S]``.
      blocks: B and P, of the prediction blocks whose places stand with each row; default: all of
        a row's blocks are in its prediction stream.
    """

    def __init__(
        self,
        row_sets: Sequence[tuple[RowSet, float]],
        *,
        seed: int,
        shape: tuple[int, int],
        streams: Sequence[Stream] | None = None,
        first: int = 0,
        skipped: SkippedBatches = NONE_SKIPPED,
        sources: int = 1,
        blocks: tuple[int, int] | None = None,
    ):
        batch_rows = shape[0] * shape[1]
        self._order = global_order(row_sets, seed=seed, batch_rows=batch_rows, streams=streams)
        self._sets = [rows for rows, _ in row_sets]
        self._streams = streams or list(map(Stream, range(len(row_sets))))
        self._shape, self._first, self._skipped = shape, first, skipped
        self._sources, self._blocks = sources, blocks

    def _numbers(self, step: int, rows: Iterable[int]) -> list[tuple[int, int]]:
        """Returns set and number of the rows of a step, ``[A * len(rows)]``."""
        accumulation, batch_rows = self._shape
        # Steps are counted from 0 here, so that the batch of step s is the s + 1st of the run.
        batch = self._skipped.between(self._first, step + 1) - 1
        turns = range(batch * accumulation, (batch + 1) * accumulation)
        rows = list(rows)
        return [self._order[turn * batch_rows + row] for turn in turns for row in rows]

    def read(self, step: int, rows: Sequence[int]) -> HostBatch:
        """Reads those of the R rows of a step, ascending: arrays ``[A, len(rows), ...]``, each with
        the last axis that it has in a row.

        Raises:
          InputError: naming a row that cannot be read, or needs more blocks than there is room for.
        """
        picked = [self._row(*number) for number in self._numbers(step, rows)]
        leading = (self._shape[0], len(rows))
        return {
            name: np.stack([row[name] for row in picked]).reshape(*leading, -1)
            for name in picked[0]
        }

    def _row(self, number: int, index: int) -> dict[str, np.ndarray]:
        row = self._sets[number][index]
        if self._sources > 1:
            row = row | {"source": np.arange(self._sources) == self._streams[number].number}
        if self._blocks is not None:
            try:
                places = prediction_blocks(row["trainable"], *self._blocks)
            except ValueError as error:
                file, place = self._sets[number].place(index)
                raise InputError(
                    f"{file}: row {place}: {error}, as prediction_blocks has"
                ) from None
            row = row | {"prediction_blocks": places}
        return row

    def places(self, step: int) -> list[list[tuple[str, int]]]:
        """Finds the rows of a step, which are not read: the file and the number there, for
        ``[A][R]``."""
        accumulation, batch_rows = self._shape
        found = [self._sets[n].place(i) for n, i in self._numbers(step, range(batch_rows))]
        return [found[turn * batch_rows :][:batch_rows] for turn in range(accumulation)]


class _HostSteps:
    """Gives grain one host's share of step ``start + i`` as element i."""

    def __init__(self, steps: StepRows, rows: Sequence[int], start: int, stop: int):
        self._steps, self._rows = steps, [int(row) for row in rows]
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return max(self._stop - self._start, 0)

    def __getitem__(self, index: Any) -> HostBatch:
        return self._steps.read(self._start + int(index), self._rows)

    def __repr__(self) -> str:
        return f"_HostSteps({self._start}, {self._stop})"


def read_ahead(
    steps: StepRows, rows: Sequence[int], start: int, stop: int, *, workers: int, prefetch: int
) -> Iterator[HostBatch]:
    """Yields steps in order, each read before it is asked for.

    Args:
      steps: what to read.
      rows: which of the R rows this host holds, ascending.
      start, stop: the first step, and the one after the last.
      workers: processes that read, whole steps by turns; 0 reads in threads of this one.
      prefetch: steps that wait ready, at least 1.
    """
    source = grain.MapDataset.source(_HostSteps(steps, rows, start, stop))  # type: ignore[arg-type]
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
