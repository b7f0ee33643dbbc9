"""Makes global batches on the mesh ahead of the step, from the rows that this host reads; the only
file that uses grain.

In each phase of a run the rows have one endless order, determined by the seed, the sources and
their weights. The next phase continues each source where this one leaves it, so nothing is read
twice or left out. Some batches of the order may be skipped (`train.recipe.skipped_batches`). So a
batch depends only on the recipe and on the step's number: it is the same for any number of hosts,
each of which reads its own rows of it, and a run that resumes needs only its step.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import Sharding

from train.recipe.phases import Phase
from train.recipe.skipped_batches import SkippedBatches
from wedlm_jax.corruption import PackedRows
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import say
from wedlm_jax.packing import prediction_blocks

HostBatch = dict[str, np.ndarray]
Shape = tuple[int, int, int]
"""(A, R, L) of a global batch."""


class RowSet(Protocol):
    """Returns rows by number: the fields of `wedlm_jax.corruption.PackedRows`, ``[L]`` each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    def place(self, index: int) -> tuple[str, int]:
        """Returns the file with row ``index``, and the row's number there, from 0."""


RowSets = Sequence[tuple[RowSet, float]]
"""Sets of packed rows, and the share that each has of a batch."""


class Stream(NamedTuple):
    """The endless sequence of a source's rows, and where a phase continues it.

    Attributes:
      number: number of the source in the run; with the seed, it determines the sequence.
      taken: number of rows that earlier phases take from it.
    """

    number: int
    taken: int


def streams_of(phases: Sequence[Phase]) -> list[list[Stream]]:
    """Returns where each phase continues its sources, in the order of its recipe."""
    skipped = SkippedBatches.of(phases[0].config.data.skip)
    numbers: dict[str, int] = {}
    taken: dict[str, int] = collections.defaultdict(int)
    found = []
    for phase in phases:
        config, sources = phase.config, phase.config.data.sources
        found.append(
            [Stream(numbers.setdefault(name, len(numbers)), taken[name]) for name in sources]
        )
        rows = skipped.between(phase.first, phase.stop) * config.accumulation * config.rows
        if phase is not phases[-1]:
            for name, count in zip(sources, _taken([*sources.values()], rows), strict=True):
                taken[name] += count
    return found


def _taken(weights: Sequence[float], rows: int) -> list[int]:
    """Counts how many of the first ``rows`` rows of a mix come from each of its sets."""
    places = [
        grain.MapDataset.range(sys.maxsize).map(functools.partial(_of_set, number))
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


def _order(
    seed: int, row_sets: Sequence[tuple[Sized, float]], streams: Sequence[Stream]
) -> grain.MapDataset:
    """Returns the endless order of a phase's rows: each set is reshuffled in every epoch, and the
    sets are mixed by weight. An element is the number of a set and of a row in it."""
    orders = []
    for number, ((row_set, _), stream) in enumerate(zip(row_sets, streams, strict=True)):
        order = grain.MapDataset.range(len(row_set)).seed(seed + stream.number).shuffle().repeat()
        order = order[stream.taken :] if stream.taken else order
        orders.append(order.map(functools.partial(_of_set, number)))
    if len(orders) == 1:
        return orders[0]
    return grain.MapDataset.mix(orders, [weight for _, weight in row_sets])


def _of_set(number: int, row: int) -> tuple[int, int]:
    return number, int(row)


class _Part(NamedTuple):
    """A phase, its sets of rows, where it continues them, and their order."""

    phase: Phase
    sets: list[RowSet]
    streams: Sequence[Stream]
    order: grain.MapDataset


class StepRows:
    """The rows that the steps of a run read, and where they are stored.

    If the run has several sources, each row names its own, as bool ``[S]``; if blocks are left out
    of the prediction stream, each row has the places of the others, ``[P]``.

    Args:
      phases: phases of the recipe.
      data: the rows of each phase, in the order of its sources.

    Attributes:
      stop: the step after the last.
    """

    def __init__(self, phases: Sequence[Phase], data: Sequence[RowSets]):
        self._parts = []
        for phase, row_sets, streams in zip(phases, data, streams_of(phases), strict=True):
            order = _order(phase.config.seed, row_sets, streams)
            self._parts.append(_Part(phase, [rows for rows, _ in row_sets], streams, order))
        self._skipped = SkippedBatches.of(phases[0].config.data.skip)
        self._sources = 1 + max(one.number for part in self._parts for one in part.streams)
        self.stop = phases[-1].stop

    def shape(self, step: int) -> Shape:
        """Returns (A, R, L) of a step's global batch."""
        return self._part(step).phase.batch_shape[:3]

    def read(self, step: int, rows: Sequence[int]) -> HostBatch:
        """Reads these of the R rows of a step, which are given in ascending order: arrays
        ``[A, len(rows), ...]``, each with the last axis that it has in a row.

        Raises:
          InputError: a row cannot be read, or needs more blocks than there is room for; the message
            names it.
        """
        picked = [self._row(step, *number) for number in self._numbers(step, rows)]
        leading = (self.shape(step)[0], len(rows))
        return {
            name: np.stack([row[name] for row in picked]).reshape(*leading, -1)
            for name in picked[0]
        }

    def places(self, step: int, rows: Sequence[int]) -> list[tuple[str, int]]:
        """Returns where these rows of all micro-batches of a step are stored, without reading them:
        the file and the number there."""
        sets = self._part(step).sets
        return [sets[number].place(index) for number, index in self._numbers(step, rows)]

    def _part(self, step: int) -> _Part:
        return next(part for part in self._parts if step < part.phase.stop)

    def _numbers(self, step: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the set and the number of each of these rows of a step, ``[A * len(rows)]``."""
        part = self._part(step)
        accumulation, batch_rows, _ = self.shape(step)
        # Steps are counted from 0 here, so the batch of step s is the s + 1st of the run.
        batch = self._skipped.between(part.phase.first, step + 1) - 1
        turns = range(batch * accumulation, (batch + 1) * accumulation)
        return [part.order[turn * batch_rows + row] for turn in turns for row in rows]

    def _row(self, step: int, number: int, index: int) -> dict[str, np.ndarray]:
        part = self._part(step)
        config, row = part.phase.config, part.sets[number][index]
        if self._sources > 1:
            row = row | {"source": np.arange(self._sources) == part.streams[number].number}
        if config.leaves_blocks_out:
            try:
                places = prediction_blocks(
                    row["trainable"], config.block_size, config.prediction_blocks
                )
            except ValueError as error:
                file, place = part.sets[number].place(index)
                raise InputError(
                    f"{file}: row {place}: {error}, the value of prediction_blocks"
                ) from None
            row = row | {"prediction_blocks": places}
        return row


class _HostSteps:
    """Gives grain one host's share of step ``start + i`` as element i, with the step's number."""

    def __init__(self, steps: StepRows, held: Mapping[Shape, Sequence[int]], start: int):
        self._steps, self._held, self._start = steps, held, start

    def __len__(self) -> int:
        return max(self._steps.stop - self._start, 0)

    def __getitem__(self, index: Any) -> tuple[int, HostBatch]:
        step = self._start + int(index)
        return step, self._steps.read(step, self._held[self._steps.shape(step)])


class TrainBatches:
    """Yields the global `PackedRows` of a run's steps in order; prints where batches are skipped.

    Every host reads only the rows that its devices hold. Threads read ahead, or worker processes,
    which take turns with whole steps; one thread places what they read on the devices.

    Args:
      phases, data: as for `StepRows`; the recipe also says how to read ahead.
      sharding: sharding of the arrays ``[A, R, L]``, whose sizes may differ between phases.
      start: the first step.

    Raises:
      InputError: while iterating, a shard cannot be read.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        data: Sequence[RowSets],
        sharding: Sharding,
        start: int = 0,
    ):
        settings, self._sharding, self._step = phases[0].config.data, sharding, start
        self._steps = steps = StepRows(phases, data)
        self._skipped = SkippedBatches.of(settings.skip)
        shapes = {phase.batch_shape[:3] for phase in phases if phase.stop > start}
        held = {shape: host_rows(sharding, shape) for shape in shapes}

        def place(read: tuple[int, HostBatch]) -> PackedRows:
            shape = steps.shape(read[0])
            return place_rows(read[1], held[shape], shape, sharding)

        own: Any = _HostSteps(steps, held, start)
        ahead = _read_ahead(grain.MapDataset.source(own), settings.workers, settings.prefetch)
        placed: Any = grain.experimental.ThreadPrefetchIterDataset(
            ahead.map(place), prefetch_buffer_size=settings.prefetch
        )
        self._ready = iter(placed)
        self._ready.start_prefetch()

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> PackedRows:
        rows = next(self._ready)
        self._step += 1
        for first, last in self._skipped.passed_by(self._step):
            say(f"step {self._step}: batches {first} to {last} are skipped (data.skip)")
        return rows

    def read_from(self, step: int) -> list[dict[str, list[int]]]:
        """Returns where the rows of a step's global batch are stored: for each process of the run,
        the files that it reads, and the numbers of its rows in each, from 0.

        Nothing is read, and processes do not communicate.
        """
        owners: dict[int, list[Any]] = collections.defaultdict(list)
        for device in list[Any](self._sharding.device_set):
            owners[device.process_index].append(device)
        found = []
        for _, devices in sorted(owners.items()):
            rows = host_rows(self._sharding, self._steps.shape(step), devices)
            files: dict[str, list[int]] = collections.defaultdict(list)
            for file, number in self._steps.places(step, rows):
                files[file].append(number)
            found.append({file: sorted(numbers) for file, numbers in sorted(files.items())})
        return found

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        self._ready.close()

    def __enter__(self) -> TrainBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_ahead(steps: grain.MapDataset, workers: int, prefetch: int) -> grain.IterDataset:
    """Reads steps before they are requested, in ``workers`` processes or in threads of this one."""
    if not workers:
        options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
        return steps.to_iter_dataset(options)
    # Grain reads a flag of its own from absl; a program that is not an absl app has parsed none.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    one = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    processes = grain.MultiprocessingOptions(
        num_workers=workers, per_worker_buffer_size=math.ceil(prefetch / workers)
    )
    return steps.to_iter_dataset(one).mp_prefetch(processes)


def host_rows(
    sharding: Sharding, shape: Shape, devices: Collection[jax.Device] | None = None
) -> list[int]:
    """Returns which of the R rows of an array ``[A, R, L]`` are on these devices (by default those
    of this host), ascending."""
    indices = sharding.devices_indices_map(shape)
    devices = sharding.addressable_devices if devices is None else devices
    return sorted({row for device in devices for row in range(shape[1])[indices[device][1]]})


def place_rows(
    local: HostBatch, rows: Sequence[int], shape: Shape, sharding: Sharding
) -> PackedRows:
    """Makes the global batch, of which this host has ``rows``.

    Args:
      local: arrays ``[A, len(rows), ...]``: ``[..., L]``, ``[..., P]`` for prediction blocks,
        ``[..., S]`` for the rows' sources.
      rows: which of the R rows these are, ascending.
      shape: (A, R, L) of the global arrays, whose last axis may differ.
      sharding: sharding of the global arrays.
    """
    place = {row: number for number, row in enumerate(rows)}

    def whole(array: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            here = range(shape[1])[index[1]]
            local_rows = slice(place[here[0]], place[here[-1]] + 1)
            return array[index[0], local_rows, index[2]]

        return jax.make_array_from_callback((*shape[:2], *array.shape[2:]), sharding, shard)

    return PackedRows(**{name: whole(array) for name, array in local.items()})
