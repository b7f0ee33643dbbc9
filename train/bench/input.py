"""How many packed rows a second the input delivers, by threads and by worker processes.

Rows are read from shards in the global, shuffled order, decoded, stacked and placed on one
device, as in a run; the consumer does nothing else.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from train.data.batches import TrainBatches
from train.data.manifest import Manifest, read_manifest
from train.data.shards import ShardRows, ShardWriter, encode_row
from train.recipe.config import DataSection, TrainConfig
from wedlm_jax.benchmark import Bar, by_turns
from wedlm_jax.packing import TokenisedSample, pack

VOCABULARY = 151_936
BLOCK = 32
RANDOM_TOKENS = 2000 * 4096

NEEDED = 512 / 20 / 16
"""Rows a second that a host takes with the 8B recipe on v5p 4x4x4: 512 rows a step, a step of
about 20 s, 16 hosts of 4 chips."""


@dataclasses.dataclass(frozen=True)
class InputSpeed:
    """Holds what one way to read took.

    Attributes:
      workers: processes that read ahead; 0 reads in threads.
      row_length, row_bytes: L, and bytes of a row on disk.
      rows_per_second: by the clock, pass by pass.
      cpu_milliseconds: of this process a row, pass by pass; the workers' own are not in it.
    """

    workers: int
    row_length: int
    row_bytes: float
    rows_per_second: list[float]
    cpu_milliseconds: list[float]

    @property
    def rows(self) -> float:
        """Returns the rows a second, the median."""
        return statistics.median(self.rows_per_second)


def compare_input(
    data: ShardRows, workers: Sequence[int], *, rows: int, batches: int, passes: int, bar: Bar
) -> list[InputSpeed]:
    """Reads the same batches with each number of workers.

    Args:
      rows: of a batch.
      batches: that are timed, after the first, which starts the workers.
    """
    manifest = data.manifest
    names = {f"{count} workers" if count else "threads": count for count in workers}
    runs = {
        name: partial(_read, data, count, manifest.row_length, rows, batches)
        for name, count in names.items()
    }
    made = by_turns(runs, passes, bar, f"rows of {manifest.row_length:,}")
    row_bytes = sum(shard.bytes for shard in manifest.shards) / manifest.rows
    speeds = []
    for name, count in names.items():
        by_second, cpu = zip(*made[name][1:], strict=True)
        speeds.append(InputSpeed(count, manifest.row_length, row_bytes, list(by_second), list(cpu)))
    return speeds


def _read(
    data: ShardRows, workers: int, row_length: int, rows: int, batches: int
) -> tuple[float, float]:
    """Measures rows a second, and milliseconds of this process a row."""
    config = TrainConfig(
        steps=batches + 1,
        rows=rows,
        row_length=row_length,
        block_size=BLOCK,
        data=DataSection(workers=workers, prefetch=max(2, workers)),
    )
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with TrainBatches([(data, 1.0)], config, place) as stream:
        jax.block_until_ready(next(stream))
        started, cpu = time.perf_counter(), time.process_time()
        for batch in stream:
            jax.block_until_ready(batch)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return rows * batches / seconds, cpu / (rows * batches) * 1e3


def open_rows(folder: Path) -> ShardRows:
    """Opens a folder of `wedlm tokenize`, whatever its tokenizer.

    Raises:
      InputError: it is none.
    """
    manifest = read_manifest(folder)
    return ShardRows(folder, manifest, 0)


def random_rows(folder: Path, rows: int, row_length: int) -> ShardRows:
    """Packs documents of random tokens and of lengths that vary into rows.

    Args:
      rows: at least so many; about as many as `RANDOM_TOKENS` fill.
    """
    rows = max(rows + 1, RANDOM_TOKENS // row_length)
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(6.5, 1.0, rows * 4).astype(int) + 1, row_length)
    lengths = lengths[np.cumsum(lengths) <= rows * row_length]
    samples = (
        TokenisedSample(random.integers(0, VOCABULARY, n).astype(np.int32), np.ones(n, bool))
        for n in lengths
    )
    writer, made = ShardWriter(folder, 4096), 0
    for members in pack(samples, row_length=row_length, block_size=BLOCK, open_rows=64):
        writer.write(encode_row(members))
        made += 1
    shards, content = writer.finish()
    tokens = int(lengths.sum())
    manifest = Manifest(
        row_length=row_length,
        block_size=BLOCK,
        tokenizer="",
        records=len(lengths),
        samples=len(lengths),
        rows=made,
        tokens=tokens,
        trainable_tokens=tokens,
        fill=tokens / (made * row_length),
        malformed=0,
        reasons={},
        made_with={},
        content=content,
        shards=shards,
    )
    return ShardRows(folder, manifest, 0)
