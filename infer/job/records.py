"""Rows of files as they stand there, read from any place on, in bounded memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple, Protocol

from infer.job.parquet import parquet_rows
from infer.job.source import PARQUET, InputFile, reading

LARGEST_LINE = 32 * 2**20
"""Bytes of a line; a longer one is a bad row, of which nothing is kept."""


class TooLong:
    """In place of a line that is longer than `LARGEST_LINE`."""


TOO_LONG = TooLong()

Content = bytes | dict[str, object] | TooLong
"""A line of JSONL, or the columns of a Parquet row that have a value."""


class Place(NamedTuple):
    """Where a row begins.

    Attributes:
      file: its number among the job's files.
      at: byte offset in a JSONL file, row number from 0 in a Parquet file.
      line: its line (in Parquet its row), from 1.
    """

    file: int
    at: int
    line: int


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def read_from(files: Sequence[InputFile], place: Place) -> Iterator[tuple[Place, Content]]:
    """The rows from ``place`` on, through all the files behind it.

    Raises:
      InputError: a file cannot be read.
    """
    for number in range(place.file, len(files)):
        file = files[number]
        start, first = (place.at, place.line) if number == place.file else (0, 1)
        if file.kind == PARQUET:
            for row, content in enumerate(parquet_rows(file, start), start):
                yield Place(number, row, row + 1), content
            continue
        for at, line, raw in jsonl_rows(file, start, first):
            yield Place(number, at, line), raw


def jsonl_rows(
    file: InputFile, at: int = 0, line: int = 1, digest: Digest | None = None
) -> Iterator[tuple[int, int, bytes | TooLong]]:
    """Byte offset, line and content of each row; lines of white space only are no rows.

    Args:
      at, line: where to begin.
      digest: is fed all the bytes that are read.
    """
    with reading(file), file.path.open("rb") as stream:
        stream.seek(at)
        while True:
            raw, size = _bounded_line(stream, digest)
            if not size:
                return
            if line == 1 and isinstance(raw, bytes):
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if isinstance(raw, TooLong) or (raw and not raw.isspace()):
                yield at, line, raw
            at, line = at + size, line + 1


def _bounded_line(stream: IO[bytes], digest: Digest | None) -> tuple[bytes | TooLong, int]:
    """The next line and its size in bytes, 0 at the end; one that is too long is read past."""
    raw = stream.readline(LARGEST_LINE + 1)
    if digest is not None:
        digest.update(raw)
    size = len(raw)
    if size <= LARGEST_LINE:
        return raw, size
    while raw and not raw.endswith(b"\n"):
        raw = stream.readline(LARGEST_LINE)
        size += len(raw)
        if digest is not None:
            digest.update(raw)
    return TOO_LONG, size
