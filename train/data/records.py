"""Input files as a stream of chunks of records, read with bounded memory, in a fixed order.

A chunk is small and travels to a worker process, which opens it into records. What cannot be
read becomes a `Malformed` in its place, so that nothing is dropped without a name.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from wedlm_jax.errors import InputError
from wedlm_jax.parquet import require_pyarrow

LARGEST_RECORD = 32 * 2**20
"""Bytes of a line or a text file; longer ones are named and left out."""

CHUNK_BYTES = 2**18
CHUNK_RECORDS = 512

KINDS = {
    ".jsonl": "lines",
    ".jsonl.gz": "lines",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
}


@dataclasses.dataclass(frozen=True)
class Malformed:
    """A record that is left out, and why.

    Attributes:
      file: as the caller named it.
      line: its line or row, from 1; 0 is the file as a whole.
      reason: of a small set, to count by.
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
      file, kind: which file, and one of the values of `KINDS`.
      first: line or row of the first record, from 1.
      lines: the raw lines where kind is "lines"; None marks one that is too long.
      count: rows of this chunk where kind is "parquet" or "arrayrecord".
      group: row group where kind is "parquet".
      problem: reason and detail, if the file can be read no further than this.
      bytes_read: of the file on disk since the chunk before, for a progress bar.
    """

    file: str
    kind: str
    first: int = 1
    lines: tuple[bytes | None, ...] = ()
    count: int = 0
    group: int = 0
    problem: tuple[str, str] | None = None
    bytes_read: int = 0


def kind_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def find_files(inputs: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Files to read, folders being searched in sorted order, and files there of other kinds.

    Raises:
      InputError: naming the input that does not exist, has no kind that can be read, or is a
        folder without any; or that pyarrow is missing.
    """
    files: list[Path] = []
    other: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
            readable = [p for p in inside if kind_of(p)]
            if not readable:
                raise InputError(f"{path}: no {', '.join(KINDS)} file is in this folder")
            files += readable
            other += [p for p in inside if not kind_of(p)]
        elif not path.exists():
            raise InputError(f"{path}: no such file or folder")
        elif kind_of(path) is None:
            raise InputError(f"{path}: expected a {', '.join(KINDS)} file")
        else:
            files.append(path)
    if any(kind_of(path) == "parquet" for path in files):
        require_pyarrow()
    return files, other


def chunks(path: Path) -> Iterator[RecordChunk]:
    """The chunks of one file in order; their sizes do not depend on anything but the file."""
    kind = kind_of(path)
    reader = {
        "lines": _line_chunks,
        "text": _text_chunks,
        "parquet": _parquet_chunks,
        "arrayrecord": _arrayrecord_chunks,
    }[kind or ""]
    name = str(path)
    try:
        size = path.stat().st_size
        if size == 0:
            yield RecordChunk(name, str(kind), problem=("the file is empty", ""))
            return
        yield from reader(path, size)
    except OSError as error:
        yield RecordChunk(name, str(kind), problem=("cannot be read", error.strerror or str(error)))


def records(chunk: RecordChunk) -> Iterator[tuple[int, dict[str, Any] | str | Malformed]]:
    """Line or row number and content: a JSON object, or the text of a text file."""
    file, kind = chunk.file, chunk.kind
    if kind == "lines":
        for number, line in enumerate(chunk.lines, chunk.first):
            if line is None:
                yield number, Malformed(file, number, *_too_long())
            elif line.strip():
                yield number, _parsed(line, file, number)
    elif chunk.problem is None and kind == "text":
        yield 0, _text(file)
    elif chunk.problem is None:
        read = _parquet_rows if kind == "parquet" else _arrayrecord_rows
        try:
            rows = read(chunk)
        except Exception as error:
            # Both libraries have error types of their own, for all that may be damaged.
            detail = f"{chunk.count} rows from here on: {_short(error)}"
            yield chunk.first, Malformed(file, chunk.first, "cannot be read", detail)
        else:
            yield from enumerate(rows, chunk.first)
    if chunk.problem is not None:
        yield 0, Malformed(file, 0, *chunk.problem)


def _line_chunks(path: Path, size: int) -> Iterator[RecordChunk]:
    name, number, first, told = str(path), 0, 1, 0
    lines: list[bytes | None] = []
    held, problem = 0, None
    with path.open("rb") as raw:
        file: Any = gzip.GzipFile(fileobj=raw) if name.lower().endswith(".gz") else raw
        while True:
            try:
                line = _bounded_line(file)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                problem = ("the compressed data is damaged", f"after line {number}: {error}")
                break
            if line == b"":
                break
            number += 1
            lines.append(line)
            held += len(line or b"")
            if held >= CHUNK_BYTES or len(lines) == CHUNK_RECORDS:
                here = min(raw.tell(), size)
                yield RecordChunk(name, "lines", first, tuple(lines), bytes_read=here - told)
                lines, held, first, told = [], 0, number + 1, here
    if lines or problem:
        left = max(size - told, 0)
        yield RecordChunk(name, "lines", first, tuple(lines), problem=problem, bytes_read=left)


def _bounded_line(file: IO[bytes]) -> bytes | None:
    """The next line; b"" at the end; None for one that is too long, which is read past."""
    line = file.readline(LARGEST_RECORD + 1)
    if len(line) <= LARGEST_RECORD:
        return line
    while line and not line.endswith(b"\n"):
        line = file.readline(LARGEST_RECORD)
    return None


def _text_chunks(path: Path, size: int) -> Iterator[RecordChunk]:
    problem = _too_long() if size > LARGEST_RECORD else None
    yield RecordChunk(str(path), "text", problem=problem, bytes_read=size)


def _parquet_chunks(path: Path, size: int) -> Iterator[RecordChunk]:
    first, told = 1, 0
    try:
        with require_pyarrow().ParquetFile(path) as file:
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except InputError:
        raise
    except Exception as error:
        # pyarrow has error types of its own; all mean that the file is damaged.
        yield RecordChunk(str(path), "parquet", problem=("not a Parquet file", _short(error)))
        return
    for group, rows in enumerate(groups):
        here = size * (group + 1) // len(groups)
        yield RecordChunk(
            str(path), "parquet", first, count=rows, group=group, bytes_read=here - told
        )
        first, told = first + rows, here


def _parquet_rows(chunk: RecordChunk) -> list[dict[str, Any] | Malformed]:
    with require_pyarrow().ParquetFile(chunk.file) as file:
        wanted = {"text", "messages", "token_ids", "trainable"}
        columns = [name for name in file.schema_arrow.names if name in wanted]
        rows = file.read_row_group(chunk.group, columns=columns).to_pylist()
    return [_without_nulls(row) for row in rows]


def _without_nulls(value: Any) -> Any:
    """Keys that only other rows fill, or other messages of the same row, are none of this one."""
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nulls(x) for x in value]
    return value


def _arrayrecord_chunks(path: Path, size: int) -> Iterator[RecordChunk]:
    from array_record.python.array_record_module import ArrayRecordReader

    try:
        reader = ArrayRecordReader(str(path))
        if not reader.ok():  # as of a small file that was cut off, which else has no records
            raise ValueError("it has no ending")
        count = int(reader.num_records())
        reader.close()
    except (OSError, RuntimeError, ValueError) as error:
        yield RecordChunk(
            str(path), "arrayrecord", problem=("not an ArrayRecord file", _short(error))
        )
        return
    told = 0
    for start in range(0, count, CHUNK_RECORDS):
        rows = min(CHUNK_RECORDS, count - start)
        here = size * (start + rows) // count
        yield RecordChunk(str(path), "arrayrecord", start + 1, count=rows, bytes_read=here - told)
        told = here


def _arrayrecord_rows(chunk: RecordChunk) -> list[dict[str, Any] | str | Malformed]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(chunk.file)
    try:
        rows = reader.read(list(range(chunk.first - 1, chunk.first - 1 + chunk.count)))
    finally:
        reader.close()
    return [_parsed(row, chunk.file, number) for number, row in enumerate(rows, chunk.first)]


def _parsed(line: bytes, file: str, number: int) -> dict[str, Any] | Malformed:
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return Malformed(file, number, "not UTF-8", f"byte {error.start}")
    except json.JSONDecodeError as error:
        return Malformed(file, number, "not JSON", f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Malformed(file, number, "not JSON", _short(error))
    if not isinstance(value, dict):
        return Malformed(file, number, "not a JSON object", type(value).__name__)
    return value


def _text(file: str) -> str | Malformed:
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Malformed(file, 0, "not UTF-8", f"byte {error.start}")
    except OSError as error:
        return Malformed(file, 0, "cannot be read", error.strerror or "")
    if "\0" in text:
        return Malformed(file, 0, "not a text", "it holds zero bytes")
    return text


def _too_long() -> tuple[str, str]:
    return "too long to read", f"more than {LARGEST_RECORD // 2**20} MiB"


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def total_bytes(files: Sequence[Path]) -> int:
    return sum(os.path.getsize(path) for path in files)
