"""Reads input files as a stream of chunks of records, with bounded memory, in a fixed order.

A chunk is small and is sent to a worker process, which opens it into records. What cannot be read
becomes a `Malformed` in its place, so that nothing is dropped silently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from train.data.chat import BESIDE, PAIRS
from wedlm_jax.errors import InputError, file_error, is_passing, require_extra, shortened
from wedlm_jax.records.compressed import DAMAGE, unpacked
from wedlm_jax.records.files import JSONL, PARQUET, FoundFiles, RecordFile, file_size, find_files
from wedlm_jax.records.jsonl import LARGEST_LINE, BadRecord, parse_object, read_lines
from wedlm_jax.records.parquet import (
    NotParquet,
    column_names,
    read_rows,
    rows_of_groups,
    without_nulls,
)

CHUNK_BYTES = 2**18
CHUNK_RECORDS = 512

TEXT, ARRAYRECORD, DATASET = "text", "arrayrecord", "dataset"
ENDINGS = {
    ".jsonl": JSONL,
    ".jsonl.gz": JSONL,
    ".jsonl.zst": JSONL,
    ".txt": TEXT,
    ".parquet": PARQUET,
    ".arrayrecord": ARRAYRECORD,
    ".array_record": ARRAYRECORD,
}
COLUMNS = (
    *("text", "messages", "conversations", "token_ids", "trainable", *BESIDE),
    *("prompt_token_ids", "samples"),
    *(name for key, beside in PAIRS.items() for name in (key, *beside)),
)


@dataclasses.dataclass(frozen=True)
class Malformed:
    """Describes a record that is left out, and why.

    Attributes:
      file: the file's name, as the caller gave it.
      line: number of the line or row, from 1; 0 is the file as a whole.
      reason: one of a small set of reasons, by which records are counted.
      detail: what is particular to this record; may be empty.
    """

    file: str
    line: int
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class RecordChunk:
    """Some records of one file.

    Attributes:
      file: the file.
      first: number of the first row, from 1, if the file has rows.
      lines: numbers and contents of lines, if the file is JSONL; None for a line that is too long.
      count: number of rows in this chunk, if the file has rows.
      unread: columns of a table that are not read.
      problem: reason and detail, if the file cannot be read beyond this chunk.
      bytes_read: bytes read from the file since the previous chunk, for a progress bar.
    """

    file: RecordFile
    first: int = 1
    lines: tuple[tuple[int, bytes | None], ...] = ()
    count: int = 0
    unread: tuple[str, ...] = ()
    problem: tuple[str, str] | None = None
    bytes_read: int = 0


def find_input(names: Sequence[str]) -> FoundFiles:
    """Finds the input, in the order of its records: files, also those in folders, and folders that
    `datasets.Dataset.save_to_disk` wrote, which must be named themselves.

    Raises:
      InputError: as `wedlm_jax.records.files.find_files`; a folder of several splits, or one for
        which the library `datasets` is missing.
    """
    files: list[RecordFile] = []
    others: list[Path] = []
    for name in names:
        folder = Path(name)
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
            shown = ", ".join(f"{name.rstrip('/')}/{split}" for split in splits)
            raise InputError(f"{name}: a dataset of several splits; name those to read: {shown}")
        if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
            require_extra(f"{name}: a folder of a Hugging Face dataset", "datasets", "datasets")
            files.append(RecordFile(folder, name, folder.name, DATASET))
            continue
        found = find_files([name], ENDINGS)
        files += found.files
        others += found.others
    return FoundFiles(tuple(files), tuple(others))


def input_size(file: RecordFile) -> int:
    """Returns the bytes of a file, or of a dataset's tables."""
    if file.kind == DATASET:
        return sum(path.stat().st_size for path in file.path.glob("*.arrow"))
    return file_size(file)


def chunks(file: RecordFile) -> Iterator[RecordChunk]:
    """Yields the chunks of one file in order; their sizes depend only on the file."""
    reader = {JSONL: _line_chunks, TEXT: _text_chunks}.get(file.kind, _row_chunks)
    try:
        size = input_size(file)
        if size == 0:
            yield RecordChunk(file, problem=("the file is empty", ""))
            return
        yield from reader(file, size)
    except OSError as error:
        if is_passing(error):
            # Not treated as malformed, which would leave out records that are there.
            raise file_error(file.shown, "cannot be read", error) from None
        yield RecordChunk(file, problem=("cannot be read", error.strerror or str(error)))


def records(chunk: RecordChunk) -> Iterator[tuple[int, dict[str, Any] | Malformed]]:
    """Yields line or row numbers and records; a text file is one record with a ``text``."""
    file = chunk.file
    if file.kind == JSONL:
        for number, line in chunk.lines:
            yield number, _parsed(line, file, number)
    elif chunk.problem is None and file.kind == TEXT:
        yield 0, _text(file)
    elif chunk.problem is None:
        try:
            rows = _rows(chunk)
        except Exception as error:
            # The libraries have many error types for damaged files.
            detail = f"{chunk.count} rows from here on: {_detail(error)}"
            yield chunk.first, Malformed(file.shown, chunk.first, "cannot be read", detail)
        else:
            yield from enumerate(rows, chunk.first)
    if chunk.problem is not None:
        yield 0, Malformed(file.shown, 0, *chunk.problem)


def _line_chunks(file: RecordFile, size: int) -> Iterator[RecordChunk]:
    lines: list[tuple[int, bytes | None]] = []
    held, told, problem = 0, 0, None
    with file.path.open("rb") as raw:
        stream = unpacked(raw, file.path)
        number = 0
        try:
            for _, number, content in read_lines(stream):
                lines.append((number, content))
                held += len(content or b"")
                if held >= CHUNK_BYTES or len(lines) == CHUNK_RECORDS:
                    here = min(raw.tell(), size)
                    yield RecordChunk(file, lines=tuple(lines), bytes_read=here - told)
                    lines, held, told = [], 0, here
        except DAMAGE as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            problem = ("the compressed data is damaged", f"after line {number}: {error}")
    left = max(size - told, 0)
    yield RecordChunk(file, lines=tuple(lines), problem=problem, bytes_read=left)


def _text_chunks(file: RecordFile, size: int) -> Iterator[RecordChunk]:
    problem = None
    if size > LARGEST_LINE:
        problem = ("too long", f"more than {LARGEST_LINE // 2**20} MiB in a text file")
    yield RecordChunk(file, problem=problem, bytes_read=size)


NAMES = {PARQUET: "a Parquet file", ARRAYRECORD: "an ArrayRecord file", DATASET: "a dataset"}


def _row_chunks(file: RecordFile, size: int) -> Iterator[RecordChunk]:
    try:
        sizes, columns = _shape(file)
    except Exception as error:
        # The libraries have many error types for damaged files.
        yield RecordChunk(file, problem=(f"not {NAMES[file.kind]}", _detail(error)))
        return
    unread = tuple(name for name in columns if name not in COLUMNS)
    first, told = 1, 0
    for number, rows in enumerate(sizes, 1):
        here = size * number // len(sizes)
        yield RecordChunk(file, first, count=rows, unread=unread, bytes_read=here - told)
        first, told = first + rows, here


def _shape(file: RecordFile) -> tuple[list[int], list[str]]:
    """Returns the number of rows of each chunk of a file, and the names of its columns."""
    if file.kind == PARQUET:
        return rows_of_groups(file.path, file.shown), column_names(file.path, file.shown)
    if file.kind == DATASET:
        table = _dataset(file.path)
        count, columns = len(table), table.column_names
    else:
        reader, count = open_array_record(file.path)
        reader.close()
        columns = []
    starts = range(0, count, CHUNK_RECORDS)
    return [min(CHUNK_RECORDS, count - start) for start in starts], columns


UNREADABLE = (OSError, RuntimeError, ValueError)
"""What ArrayRecord raises for a file that it cannot read or write."""


def open_array_record(path: Path) -> tuple[ArrayRecordReader, int]:
    """Returns a reader of a file, and the number of its records; raises one of `UNREADABLE`."""
    reader = ArrayRecordReader(str(path))
    if not reader.ok():  # such as a small file that was cut off, which seems to be empty
        raise ValueError("its end is missing")
    return reader, int(reader.num_records())


def _detail(error: Exception) -> str:
    return error.detail if isinstance(error, NotParquet) else shortened(str(error))


def _rows(chunk: RecordChunk) -> list[dict[str, Any] | Malformed]:
    file, start = chunk.file, chunk.first - 1
    if file.kind == PARQUET:
        return list(read_rows(file.path, file.shown, COLUMNS, start, chunk.count))
    if file.kind == DATASET:
        table = _dataset(file.path)
        read = table.select_columns([name for name in table.column_names if name in COLUMNS])
        rows = read.select(range(start, start + chunk.count)).to_list()
        return [without_nulls(row) for row in rows]
    reader, _ = open_array_record(file.path)
    with contextlib.closing(reader):
        rows = reader.read(list(range(start, start + chunk.count)))
    return [_parsed(row, file, number) for number, row in enumerate(rows, chunk.first)]


@functools.cache
def _dataset(folder: Path) -> Any:
    """Returns the dataset of a folder, mapped into memory."""
    import datasets

    return datasets.load_from_disk(str(folder))


def _parsed(line: bytes | None, file: RecordFile, number: int) -> dict[str, Any] | Malformed:
    try:
        return parse_object(line)
    except BadRecord as bad:
        return Malformed(file.shown, number, bad.reason, bad.detail)


def _text(file: RecordFile) -> dict[str, Any] | Malformed:
    try:
        text = file.path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Malformed(file.shown, 0, "not UTF-8", f"byte {error.start}")
    except OSError as error:
        if is_passing(error):
            raise file_error(file.shown, "cannot be read", error) from None
        return Malformed(file.shown, 0, "cannot be read", error.strerror or "")
    if "\0" in text:
        return Malformed(file.shown, 0, "not a text", "it holds zero bytes")
    return {"text": text}
