"""Folders of packed rows: ArrayRecord shards, written in order, read by row number.

A shard is ``rows-00000-of-00008.arrayrecord``; a record in it is one row. Its bytes are, all
little-endian: how many samples there are, the length of each, then their tokens one after another
(uint32 each), then their trainable flags, eight to a byte. Padding, positions and segment ids
follow from the lengths, because every sample begins at a multiple of the block size.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from train.data.manifest import DataShard, Manifest
from wedlm_jax.errors import InputError, StorageFailure, shortened
from wedlm_jax.packing import TokenisedSample, row_arrays

_WORD = np.dtype("<u4")


def encode_row(samples: Sequence[TokenisedSample]) -> bytes:
    sizes = [len(sample.tokens) for sample in samples]
    tokens = np.concatenate([sample.tokens for sample in samples])
    trainable = np.concatenate([sample.trainable for sample in samples])
    words = np.concatenate([np.array([len(sizes), *sizes], _WORD), tokens.astype(_WORD)])
    return words.tobytes() + np.packbits(trainable).tobytes()


def decode_row(
    record: bytes, *, row_length: int, block_size: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Reads the arrays of `wedlm_jax.packing.row_arrays`, ``[L]`` each.

    Raises:
      ValueError: ``record`` is not a row of these sizes.
    """
    samples = decode_samples(record)
    room = sum(-(-len(sample.tokens) // block_size) * block_size for sample in samples)
    if not 0 < room <= row_length:
        raise ValueError(f"{len(samples)} samples take {room} tokens of {row_length}")
    return row_arrays(
        samples, row_length=row_length, block_size=block_size, pad_token_id=pad_token_id
    )


def decode_samples(record: bytes) -> list[TokenisedSample]:
    """Reads the samples of a row.

    Raises:
      ValueError: ``record`` is no row.
    """
    count = int(np.frombuffer(record, _WORD, 1)[0])
    sizes = np.frombuffer(record, _WORD, count, _WORD.itemsize).astype(np.int64)
    total = int(sizes.sum())
    start = (1 + count) * _WORD.itemsize
    end = start + total * _WORD.itemsize
    if len(record) != end + -(-total // 8):
        raise ValueError(f"{len(record)} bytes, where {total} tokens take another number")
    tokens = np.frombuffer(record, _WORD, total, start).astype(np.int32)
    trainable = np.unpackbits(np.frombuffer(record, np.uint8, offset=end), count=total)
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(tokens, ends), np.split(trainable.astype(bool), ends), strict=True)
    return [TokenisedSample(ids, flags) for ids, flags in parts]


WRITER_OPTIONS = "group_size:1,zstd:1"
"""One row per group: rows are read one by one, in no order of the file's."""


class ShardWriter:
    """Writes rows into shards of ``shard_rows`` each; their names come last, with their count.

    Args:
      folder: exists, and is empty of shards.
      shard_rows: rows in a file.

    Raises:
      StorageFailure: a file cannot be written.
    """

    def __init__(self, folder: Path, shard_rows: int):
        self._folder, self._shard_rows = folder, shard_rows
        self._paths: list[Path] = []
        self._rows: list[int] = []
        self._writer: Any = None
        self._digest = hashlib.sha256()

    def write(self, record: bytes) -> None:
        if self._writer is None or self._rows[-1] == self._shard_rows:
            self._finish_shard()
            self._paths.append(self._folder / f"{len(self._paths):05d}.arrayrecord")
            self._rows.append(0)
            self._checked(self._open)
        self._checked(self._writer.write, record)
        self._rows[-1] += 1
        self._digest.update(len(record).to_bytes(8, "little"))
        self._digest.update(record)

    def finish(self) -> tuple[list[DataShard], str]:
        """Closes and names the shards; returns them and the SHA-256 of all rows in order."""
        self._finish_shard()
        shards = []
        for number, (path, rows) in enumerate(zip(self._paths, self._rows, strict=True)):
            name = f"rows-{number:05d}-of-{len(self._paths):05d}.arrayrecord"
            path = path.rename(self._folder / name)
            shards.append(DataShard(name, rows, path.stat().st_size))
        return shards, self._digest.hexdigest()

    def _open(self) -> None:
        self._writer = ArrayRecordWriter(str(self._paths[-1]), WRITER_OPTIONS)

    def _finish_shard(self) -> None:
        if self._writer is not None:
            self._checked(self._writer.close)
            self._writer = None

    def _checked(self, act: Any, *arguments: Any) -> None:
        try:
            act(*arguments)
        except (OSError, RuntimeError, ValueError) as error:
            # Into a folder just made, only the disk can refuse.
            raise StorageFailure(
                f"{self._paths[-1]}: cannot be written ({shortened(str(error))})"
            ) from None


class ShardRows:
    """Gives the rows of a folder by number; opened when first read, in whatever process that is.

    Args:
      folder: folder of the shards.
      manifest: the folder's.
      pad_token_id: what padding holds.

    Attributes:
      manifest: as given.
    """

    def __init__(self, folder: Path, manifest: Manifest, pad_token_id: int):
        self._folder, self.manifest = folder, manifest
        self._ends = list(itertools.accumulate(shard.rows for shard in manifest.shards))
        self._sizes = {
            "row_length": manifest.row_length,
            "block_size": manifest.block_size,
            "pad_token_id": pad_token_id,
        }
        # With their numbers of rows given, files are not opened to be counted.
        self._records = ArrayRecordDataSource(
            [f"{folder / shard.file}[0:{shard.rows}]" for shard in manifest.shards]
        )

    def __len__(self) -> int:
        return self.manifest.rows

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        """Reads row ``index``: the fields of `wedlm_jax.corruption.PackedRows`, ``[L]`` each.

        Raises:
          InputError: naming the folder and the row that cannot be read.
        """
        try:
            return decode_row(self._records[int(index)], **self._sizes)
        except (OSError, RuntimeError, ValueError, IndexError) as error:
            raise InputError(
                f"{self._folder}: row {index} cannot be read ({shortened(str(error))})"
            ) from None

    def place(self, index: int) -> tuple[str, int]:
        """Finds the shard that holds row ``index``, and its number there, from 0."""
        shard = bisect.bisect_right(self._ends, index)
        first = self._ends[shard] - self.manifest.shards[shard].rows
        return str(self._folder / self.manifest.shards[shard].file), index - first

    def __repr__(self) -> str:
        return f"ShardRows({self._folder}, {self.manifest.content})"
