"""The first pass over a job's input: how many rows, where each shard begins, which ids come
twice, and a digest of it all. Memory is 8 bytes a row, and some for each shard."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from infer.job.prompt_rows import row_fields, row_id
from infer.job.records import Content, Digest, Place, jsonl_rows
from infer.job.source import COPY_BYTES, PARQUET, InputFile, file_size, reading
from wedlm_jax.errors import InputError

TELL_EVERY = 2**18
"""Rows between two words on how far the pass is."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Consecutive rows that are written as one file.

    Attributes:
      number: from 0.
      first: number of its first row in the whole input.
      rows: how many it has.
      place: where its first row begins.
    """

    number: int
    first: int
    rows: int
    place: Place


@dataclasses.dataclass(frozen=True)
class RowIndex:
    """What the first pass found.

    Attributes:
      rows: how many there are.
      digest: of the files' contents; of their names, too, where there are several.
      sizes: of the files, in bytes.
      shard_size: rows of a shard.
      shards: in order; all but the last have so many rows.
      repeated: int64 ``[R]``, sorted: numbers of rows whose id an earlier row has.
      originals: int64 ``[R]``: the number of that earlier row, for each.
    """

    rows: int
    digest: str
    sizes: tuple[int, ...]
    shard_size: int
    shards: tuple[Shard, ...]
    repeated: np.ndarray
    originals: np.ndarray

    def original(self, number: int) -> int | None:
        """The first row that has the same id as this one, if that is another."""
        place = int(np.searchsorted(self.repeated, number))
        if place < len(self.repeated) and self.repeated[place] == number:
            return int(self.originals[place])
        return None


def build_index(
    files: Sequence[InputFile], shard_size: int, tell: Callable[[int], None] = lambda _: None
) -> RowIndex:
    """Reads all of the input once.

    Args:
      files: in the order of their rows.
      shard_size: rows of a shard.
      tell: is told now and then how many rows have been read.

    Raises:
      InputError: a file cannot be read.
    """
    begins: list[Place] = []
    ids = array("Q")
    contents: list[list[str]] = []
    sizes: list[int] = []
    for number, file in enumerate(files):
        digest = hashlib.sha256()
        sizes.append(file_size(file))
        for at, line, claim in _claims(file, digest, ids):
            if len(ids) % shard_size == 0:
                begins.append(Place(number, at, line))
            ids.append(_id_digest(claim))
            if len(ids) % TELL_EVERY == 0:
                tell(len(ids))
        name = file.name if len(files) > 1 else ""
        contents.append([name, file.kind, digest.hexdigest()])
    shards = tuple(
        Shard(k, k * shard_size, min(shard_size, len(ids) - k * shard_size), place)
        for k, place in enumerate(begins)
    )
    whole = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    repeated, originals = _repeated(np.array(ids, np.uint64))
    return RowIndex(len(ids), whole, tuple(sizes), shard_size, shards, repeated, originals)


def _claims(
    file: InputFile, digest: Digest, ids: Sequence[int]
) -> Iterator[tuple[int, int, tuple[str, Any]]]:
    """Offset, line and claimed id of each row.

    A row claims an id if it names one, or its number if it is an object that names none,
    whatever else may be wrong with it; anything else claims nothing that another can.
    """

    def claim(content: Content) -> tuple[str, Any]:
        number = len(ids)
        try:
            return "id", row_id(row_fields(content), number)
        except InputError:
            return "none", number

    if file.kind == PARQUET:
        from infer.job.parquet import parquet_ids

        with reading(file), file.path.open("rb") as stream:
            while block := stream.read(COPY_BYTES):
                digest.update(block)
        for row, content in enumerate(parquet_ids(file)):
            yield row, row + 1, claim(content)
        return
    for at, line, raw in jsonl_rows(file, digest=digest):
        yield at, line, claim(raw)


def _id_digest(claim: tuple[str, Any]) -> int:
    """64 bits: among ten million ids, two unlike ones share them once in 370,000 jobs."""
    text = json.dumps(claim).encode("ascii")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _repeated(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the rows, sorted, whose digest an earlier row has, and of that first row."""
    order = np.argsort(digests, kind="stable")
    ranked = digests[order]
    again = np.zeros(len(order), bool)
    again[1:] = ranked[1:] == ranked[:-1]
    # A stable sort keeps equal digests in the order of their rows, so each run of them
    # begins with the first.
    run = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
    repeated, originals = order[again], order[run[again]]
    by_row = np.argsort(repeated)
    return repeated[by_row], originals[by_row]
