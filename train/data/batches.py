"""Global batches on the mesh, made ahead of the step from the rows that this host holds; of one
phase of a run after another."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from train.data.order import HostBatch, RowSet, StepRows, Stream, read_ahead
from train.recipe.config import TrainConfig
from train.recipe.phases import Phase
from train.recipe.skipped_batches import SkippedBatches
from wedlm_jax.corruption import PackedRows
from wedlm_jax.host.processes import say

RowSets = Sequence[tuple[RowSet, float]]
"""Packed rows, and the share that each set has of a batch."""


class TrainBatches:
    """Yields the batches of a run in order, from step ``start`` on, as global `PackedRows`.

    A batch is a function of the seed, of what the recipe skips and of the step number. Every host
    reads only the rows that its devices hold; threads or worker processes read ahead, and one
    thread places what they read on the devices.

    Args:
      data: the rows to read.
      config: recipe of the run: shape of a batch, seed, last step, and how to read ahead.
      sharding: sharding of the arrays ``[A, R, L]``.
      start: the first step.
      stop: the step after the last; default: the run's.
      first: the step with which the order of the rows begins.
      streams: where the order goes on with each set of rows; default: at its beginning.
      sources: how many sets of rows the whole run has; as in `StepRows`.

    Attributes:
      input_wait: seconds that `next` has waited for input, all calls together.

    Raises:
      InputError: there are fewer rows than one batch takes; while iterating, a shard that
        cannot be read.
    """

    def __init__(
        self,
        data: RowSets,
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
        self._shape = (config.accumulation, config.rows, config.row_length)
        self._sharding = sharding
        self._steps = StepRows(
            data,
            seed=config.seed,
            shape=self._shape[:2],
            streams=streams,
            first=first,
            skipped=SkippedBatches.of(config.data.skip),
            sources=sources,
            blocks=(config.block_size, config.prediction_blocks)
            if config.leaves_blocks_out
            else None,
        )
        self._rows = host_rows(sharding, self._shape)
        self._ahead = read_ahead(
            self._steps,
            self._rows,
            start,
            config.steps if stop is None else stop,
            workers=config.data.workers,
            prefetch=config.data.prefetch,
        )
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
        """Returns where the rows of a step's global batch are stored: of each process of the run,
        the files that it reads, and the numbers of its rows in each, from 0.

        Nothing is read, and no process has to ask another.
        """
        places = self._steps.places(step)
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
        """Returns whether there was room for it before the batches were closed."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.05)
                return True
        return False


class PhasedBatches:
    """Yields the global `PackedRows` of a run's steps, one phase after another, and says where
    batches are skipped.

    Args:
      phases: phases of the recipe.
      data: the rows of each.
      sharding: sharding of the arrays ``[A, R, L]``, whose sizes the phases may change.
      start: the first step.
      sources: as in `TrainBatches`.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        data: Sequence[RowSets],
        sharding: Sharding,
        start: int = 0,
        *,
        sources: int = 1,
    ):
        self._left = [(p, d) for p, d in zip(phases, data, strict=True) if p.stop > start]
        self._sharding, self._step, self._sources = sharding, start, sources
        self._skipped = SkippedBatches.of(phases[0].config.data.skip)
        self._phase, self._batches = self._open()
        self._earlier: list[tuple[int, Callable[[int], list[dict[str, list[int]]]]]] = []

    def _open(self) -> tuple[Phase, TrainBatches]:
        phase, data = self._left.pop(0)
        batches = TrainBatches(
            data,
            phase.config,
            self._sharding,
            start=self._step,
            stop=phase.stop,
            first=phase.first,
            streams=phase.streams,
            sources=self._sources,
        )
        return phase, batches

    def __next__(self) -> PackedRows:
        if self._step == self._phase.stop and self._left:
            self._earlier.append((self._phase.stop, self._batches.read_from))
            self._batches.close()
            self._phase, self._batches = self._open()
        self._step += 1
        for first, last in self._skipped.passed_by(self._step):
            say(f"step {self._step}: batches {first} to {last} are skipped (data.skip)")
        return next(self._batches)

    def read_from(self, step: int) -> list[dict[str, list[int]]]:
        """Returns what `TrainBatches.read_from` does, of any step since the first."""
        for stop, read_from in self._earlier:
            if step < stop:
                return read_from(step)
        return self._batches.read_from(step)

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        self._batches.close()


def host_rows(
    sharding: Sharding, shape: tuple[int, int, int], devices: Collection[jax.Device] | None = None
) -> list[int]:
    """Finds which of the R rows of an array ``[A, R, L]`` are on these devices, ascending.

    Args:
      sharding: sharding of the array.
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
      sharding: sharding of the global arrays.
    """
    place = {row: number for number, row in enumerate(rows)}

    def whole(array: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            wanted = range(shape[1])[index[1]]
            here = slice(place[wanted[0]], place[wanted[-1]] + 1)
            return array[index[0], here, index[2]]

        return jax.make_array_from_callback((*shape[:2], *array.shape[2:]), sharding, shard)

    return PackedRows(**{name: whole(array) for name, array in local.items()})
