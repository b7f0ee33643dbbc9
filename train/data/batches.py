"""Global batches on the mesh, made ahead of the step from the rows that this host holds."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from train.data.order import (
    HostBatch,
    HostSteps,
    RowSet,
    RowsOfSource,
    Stream,
    global_order,
    read_ahead,
    step_places,
)
from train.data.placed import PlacedRows
from train.recipe.config import TrainConfig
from train.recipe.skipped_batches import SkippedBatches
from train.recipe.streams import leaves_blocks_out
from wedlm_jax.corruption import PackedRows


class TrainingRows(Protocol):
    """Holds what a run reads: sets of packed rows, and the share that each has of a batch."""

    def row_sets(self) -> Sequence[tuple[RowSet, float]]: ...


class TrainBatches:
    """Yields the batches of a run in order, from step ``start`` on, as global `PackedRows`.

    A batch is a function of the seed, of what the recipe skips and of the step number. Every host
    reads only the rows that its devices hold; threads or worker processes read ahead, and one
    thread places what they read on the devices.

    Args:
      data: the packed rows.
      config: of the run: shape of a batch, seed, last step, and how to read ahead.
      sharding: of the arrays ``[A, R, L]``.
      start: the first step.
      stop: the step after the last; default: the run's.
      first: the step with which the order of the rows begins.
      streams: where the order goes on with each set of rows; default: at its beginning.
      sources: how many sets of rows the run has, those of other phases too, by the numbers of
        their streams. Where there are several each row tells its own.

    Attributes:
      input_wait: seconds that `next` has waited for input, all calls together.

    Raises:
      InputError: there are fewer rows than one batch takes; while iterating, a shard that
        cannot be read.
    """

    def __init__(
        self,
        data: TrainingRows,
        config: TrainConfig,
        sharding: Sharding,
        start: int = 0,
        *,
        stop: int | None = None,
        first: int = 0,
        streams: Sequence[Stream] | None = None,
        sources: int = 1,
    ):
        self.input_wait = 0.0
        self._first, self._streams = first, streams
        self._shape = (config.accumulation, config.rows, config.row_length)
        self._sharding = sharding
        sets = _of_sources(data.row_sets(), streams, sources)
        self._row_sets, self._seed = _placed(sets, config), config.seed
        order = global_order(
            self._row_sets,
            seed=self._seed,
            batch_rows=config.accumulation * config.rows,
            streams=streams,
        )
        self._rows = host_rows(sharding, self._shape)
        stop = config.steps if stop is None else stop
        self._skipped = SkippedBatches.of(config.data.skip)
        steps = HostSteps(order, self._shape[:2], self._rows, start, stop, first, self._skipped)
        self._ahead = read_ahead(steps, workers=config.data.workers, prefetch=config.data.prefetch)
        self._ready: queue.Queue[Any] = queue.Queue(config.data.prefetch)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="train-batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> PackedRows:
        asked = time.perf_counter()
        item = self._ready.get()
        self.input_wait += time.perf_counter() - asked
        if isinstance(item, BaseException):
            self._ready.put(item)  # a later call must not wait for a thread that has ended
            raise item
        return item

    def read_from(self, step: int) -> list[dict[str, list[int]]]:
        """Tells where the rows of a step's global batch stand: of each process of the run, the
        files that it reads, and the numbers of its rows in each, from 0.

        Nothing is read, and no process has to ask another.
        """
        accumulation, batch_rows, _ = self._shape
        places = step_places(
            self._row_sets,
            seed=self._seed,
            shape=(accumulation, batch_rows),
            batch=self._skipped.between(self._first, step + 1) - 1,
            streams=self._streams,
        )
        owners: dict[int, list[Any]] = collections.defaultdict(list)
        for device in list[Any](self._sharding.device_set):
            owners[device.process_index].append(device)
        found = []
        for process in sorted(owners):
            files: dict[str, list[int]] = collections.defaultdict(list)
            for row in host_rows(self._sharding, self._shape, owners[process]):
                for turn in places:
                    file, number = turn[row]
                    files[file].append(number)
            found.append({file: sorted(numbers) for file, numbers in sorted(files.items())})
        return found

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(StopIteration())  # for whoever asks for more
        if close := getattr(self._ahead, "close", None):
            close()

    def __enter__(self) -> TrainBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        last: BaseException = StopIteration()
        try:
            for local in self._ahead:
                if not self._offer(place_rows(local, self._rows, self._shape, self._sharding)):
                    return
        except BaseException as error:
            last = error
        self._offer(last)

    def _offer(self, item: Any) -> bool:
        """Tells whether there was room for it before the batches were closed."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.05)
                return True
        return False


def _of_sources(
    row_sets: Sequence[tuple[RowSet, float]], streams: Sequence[Stream] | None, sources: int
) -> Sequence[tuple[RowSet, float]]:
    if sources == 1:
        return row_sets
    numbers = range(len(row_sets)) if streams is None else [stream.number for stream in streams]
    return [
        (RowsOfSource(rows, number, sources), weight)
        for number, (rows, weight) in zip(numbers, row_sets, strict=True)
    ]


def _placed(
    row_sets: Sequence[tuple[RowSet, float]], config: TrainConfig
) -> Sequence[tuple[RowSet, float]]:
    """Has each row's prediction blocks read with it, if the recipe leaves some out."""
    if not leaves_blocks_out(config):
        return row_sets
    return [
        (PlacedRows(rows, config.block_size, config.prediction_blocks), weight)
        for rows, weight in row_sets
    ]


def host_rows(
    sharding: Sharding, shape: tuple[int, int, int], devices: Collection[jax.Device] | None = None
) -> list[int]:
    """Finds which of the R rows of an array ``[A, R, L]`` are on these devices, ascending.

    Args:
      sharding: of the array.
      shape: (A, R, L).
      devices: default: those of this host.
    """
    indices = sharding.devices_indices_map(shape)
    devices = sharding.addressable_devices if devices is None else devices
    return sorted({row for device in devices for row in range(shape[1])[indices[device][1]]})


def place_rows(
    local: HostBatch, rows: Sequence[int], shape: tuple[int, int, int], sharding: Sharding
) -> PackedRows:
    """Makes the global batch of which this host has ``rows``.

    Args:
      local: arrays ``[A, len(rows), ...]``: ``[..., L]``, ``[..., P]`` of prediction blocks,
        ``[..., S]`` of the rows' sources.
      rows: which of the R rows these are, ascending.
      shape: (A, R, L), the global one; the last may be another.
      sharding: of the global arrays.
    """
    place = {row: number for number, row in enumerate(rows)}

    def whole(array: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            wanted = range(shape[1])[index[1]]
            here = slice(place[wanted[0]], place[wanted[-1]] + 1)
            return array[index[0], here, index[2]]

        return jax.make_array_from_callback((*shape[:2], *array.shape[2:]), sharding, shard)

    return PackedRows(**{name: whole(array) for name, array in local.items()})
