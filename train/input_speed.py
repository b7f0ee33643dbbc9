"""How many packed rows a second the input delivers, against what a pod asks for.

    python -m train.input_speed [--row-length 4096] [--workers 0 2] [--data DIR]

Rows are read from shards in the global, shuffled order, decoded, stacked and placed on one
device, as in a run; the consumer does nothing else. Without --data, rows of random tokens are
written to a temporary folder first.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from train.config import DataSection, TrainConfig
from train.data.batches import TrainBatches
from train.data.manifest import Manifest, read_manifest
from train.data.row_codec import encode_row
from train.data.shards import ShardRows, ShardWriter
from train.data.sources import Sources
from wedlm_jax.packing import TokenisedSample, pack

VOCABULARY = 151_936
BLOCK = 32

# The 8B recipe on v5p 4x4x4: 512 rows a step, a step of about 20 s, 16 hosts of 4 chips.
NEEDED = 512 / 20 / 16


@dataclasses.dataclass(frozen=True)
class InputSpeed:
    """With so many worker processes; 0 reads in threads.

    Attributes:
      rows_per_second: by the clock.
      cpu_seconds: of this process, a row; workers' own are not in it.
    """

    workers: int
    rows_per_second: float
    cpu_seconds: float


def measure(
    data: Sources, workers: Sequence[int], *, row_length: int, batch_rows: int, steps: int
) -> list[InputSpeed]:
    """Times ``steps`` batches for each number of workers, after the first, which starts them."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    speeds = []
    for count in workers:
        config = TrainConfig(
            steps=steps + 1,
            rows=batch_rows,
            row_length=row_length,
            block_size=BLOCK,
            data=DataSection(workers=count, prefetch=max(2, count)),
        )
        with TrainBatches(data, config, place) as batches:
            jax.block_until_ready(next(batches))
            started, cpu = time.perf_counter(), time.process_time()
            for rows in batches:
                jax.block_until_ready(rows)
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        read = steps * batch_rows
        speeds.append(InputSpeed(count, read / seconds, cpu / read))
    return speeds


def random_rows(folder: Path, rows: int, row_length: int) -> Sources:
    """Documents of random tokens and of lengths that vary, packed; about ``rows`` rows."""
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
    return Sources([ShardRows(folder, manifest, 0)], [manifest], [1.0])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.input_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", metavar="DIR", help="a folder of `wedlm tokenize`")
    parser.add_argument("--row-length", type=int, default=4096, help="[%(default)s]")
    parser.add_argument("--rows", type=int, default=2000, help="random rows [%(default)s]")
    parser.add_argument("--batch-rows", type=int, default=32, help="in a batch [%(default)s]")
    parser.add_argument("--steps", type=int, default=100, help="batches timed [%(default)s]")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="[0 2]")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        if options.data:
            folder = Path(options.data)
            manifest = read_manifest(folder)
            data = Sources([ShardRows(folder, manifest, 0)], [manifest], [1.0])
        else:
            data = random_rows(Path(temporary), options.rows, options.row_length)
        manifest = data.manifests[0]
        size = sum(shard.bytes for shard in manifest.shards) / manifest.rows
        print(f"{manifest.rows:,} rows of {manifest.row_length}, {size:,.0f} bytes each on disk")
        for speed in measure(
            data,
            options.workers,
            row_length=manifest.row_length,
            batch_rows=options.batch_rows,
            steps=options.steps,
        ):
            how = f"{speed.workers} worker processes" if speed.workers else "threads in process"
            print(
                f"{how}: {speed.rows_per_second:,.0f} rows/s, "
                f"{speed.rows_per_second * manifest.row_length / 1e6:,.1f} M tokens/s, "
                f"{speed.rows_per_second / NEEDED:,.0f} times the {NEEDED:.1f} rows/s that a host "
                f"of a v5p 4x4x4 needs; {speed.cpu_seconds * 1e3:.2f} ms of this process a row"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
