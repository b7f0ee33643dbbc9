"""What a job reads: files, folders and pipes, as files that can be read twice, and their records
from any place on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from wedlm_jax.errors import InputError, file_error
from wedlm_jax.host.atomic import naming, writer_name
from wedlm_jax.records.compressed import is_compressed, naming_damage, skip, unpacked
from wedlm_jax.records.files import JSONL, PARQUET, FoundFiles, RecordFile, find_files, reading
from wedlm_jax.records.jsonl import Digest, read_lines
from wedlm_jax.records.parquet import column_names, read_rows

PROMPT_KINDS = ("prompt", "prompt_token_ids", "messages")
FOR_TEMPLATE = ("tools", "chat_template_kwargs")
KEYS = (*PROMPT_KINDS, "id", "sampling", "window_size", *FOR_TEMPLATE)
"""Lists the keys of a record that mean something, in JSONL and in Parquet. All others are the
user's own, which the output repeats."""

ENDINGS = {".jsonl": JSONL, ".jsonl.gz": JSONL, ".jsonl.zst": JSONL, ".parquet": PARQUET}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files, of which those in `ENDINGS` are unpacked."""
STANDARD_INPUT = "-"
SPOOL = "spooled-"
COPY_BYTES = 2**20

Content = bytes | dict[str, Any] | None
"""A line of JSONL, None if it is too long; or the columns of a Parquet row that have a value."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Holds what ``--input`` names, before any of it is read.

    Attributes:
      files: in the order of their records; none where there is a pipe.
      pipe: standard input or a named pipe, which can be read once.
      others: files in the folders that are neither JSONL nor Parquet.
      folders: the folders that were searched.
    """

    files: tuple[RecordFile, ...]
    pipe: str | None = None
    others: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()

    @property
    def shown(self) -> str:
        """In a message: the one file, or what else there is."""
        if self.pipe is not None:
            return "standard input" if self.pipe == STANDARD_INPUT else self.pipe
        return self.files[0].shown if len(self.files) == 1 else "the input"


class Place(NamedTuple):
    """Says where a record begins.

    Attributes:
      file: its number among the job's files.
      at: byte offset in a JSONL file, once unpacked; row number from 0 in a Parquet file.
      line: its line (in Parquet its row), from 1.
    """

    file: int
    at: int
    line: int


def find_input(names: Sequence[str]) -> Source:
    """Finds files as they are named, and those of folders in sorted order.

    Raises:
      InputError: naming what does not exist, cannot be read, or does not go together.
    """
    pipes = [name for name in names if _is_pipe(name)]
    if pipes:
        if len(names) > 1:
            raise InputError(f"{pipes[0]}: a pipe is read alone, without other input")
        return Source((), pipe=pipes[0])
    found: FoundFiles = find_files(names, ENDINGS, otherwise=JSONL)
    seen: set[Path] = set()
    for file in found.files:
        name = file.path.name.lower()
        if name.endswith(COMPRESSED) and not name.endswith(tuple(ENDINGS)):
            raise InputError(
                f"{file.shown}: is compressed; unpack it, or pipe what it holds to --input -"
            )
        if file.path.resolve() in seen:
            raise InputError(f"{file.shown}: is named twice as input")
        seen.add(file.path.resolve())
    return Source(found.files, others=found.others, folders=found.folders)


def spool(pipe: str, folder: Path) -> RecordFile:
    """Copies what a pipe delivers, JSONL, into ``folder``: the job reads its records twice.

    Raises:
      InputError: it cannot be read or written.
    """
    digest = hashlib.sha256()
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        arriving = folder / f"{SPOOL}{writer_name()}.tmp"
        try:
            with arriving.open("xb") as file:
                for block in _blocks(pipe):
                    digest.update(block)
                    file.write(block)
            # Named by its contents, so that another job's copy is never overwritten.
            path = folder / f"{SPOOL}{digest.hexdigest()[:16]}.jsonl"
            os.replace(arriving, path)
        except BaseException:
            arriving.unlink(missing_ok=True)
            raise
    shown = "standard input" if pipe == STANDARD_INPUT else pipe
    return RecordFile(path, shown, shown, JSONL)


def read_from(files: Sequence[RecordFile], place: Place) -> Iterator[tuple[Place, Content]]:
    """Yields the records from ``place`` on, through all the files after it.

    Raises:
      InputError: a file cannot be read.
    """
    for number in range(place.file, len(files)):
        file = files[number]
        start, first = (place.at, place.line) if number == place.file else (0, 1)
        if file.kind == PARQUET:
            rows = read_rows(file.path, file.shown, start=start, optional=KEYS)
            for row, columns in enumerate(rows, start):
                yield Place(number, row, row + 1), with_sampling(columns)
            continue
        with _opened(file) as stream:
            if is_compressed(file.path):
                skip(stream, start)
            elif start:
                stream.seek(start)
            for line in read_lines(stream, start, first):
                yield Place(number, line.at, line.number), line.content


def read_for_ids(file: RecordFile, digest: Digest) -> Iterator[tuple[int, int, Content]]:
    """Yields offset (in Parquet the row) and line of each record of a file, and enough of it to
    tell its id.

    Args:
      digest: is fed all the bytes of the file.

    Raises:
      InputError: the file cannot be read, or is Parquet without a column that holds prompts.
    """
    with _opened(file) as stream:
        if file.kind != PARQUET:
            yield from read_lines(stream, digest=digest)
            return
        while block := stream.read(COPY_BYTES):
            digest.update(block)
    names = column_names(file.path, file.shown)
    if not set(names) & set(PROMPT_KINDS):
        raise InputError(
            f"{file.shown}: expected a column {', '.join(PROMPT_KINDS[:-1])} or "
            f"{PROMPT_KINDS[-1]}; there are {', '.join(names) or 'none'}"
        )
    for row, columns in enumerate(read_rows(file.path, file.shown, ["id"])):
        yield row, row + 1, columns


@contextlib.contextmanager
def _opened(file: RecordFile) -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as opened:
        opened.enter_context(reading(file))
        raw = opened.enter_context(file.path.open("rb"))
        opened.enter_context(naming_damage(file.shown))
        yield opened.enter_context(unpacked(raw, file.path))


def with_sampling(columns: dict[str, Any]) -> dict[str, Any]:
    """Returns a Parquet row with its ``sampling`` parsed if that is a text of JSON: a single column
    type does not suit every record's fields."""
    sampling = columns.get("sampling")
    if isinstance(sampling, str):
        with contextlib.suppress(ValueError, RecursionError):
            return columns | {"sampling": json.loads(sampling)}
    return columns


def _blocks(pipe: str) -> Iterator[bytes]:
    try:
        with contextlib.ExitStack() as opened:
            stream: IO[bytes] = sys.stdin.buffer
            if pipe != STANDARD_INPUT:
                stream = opened.enter_context(open(pipe, "rb"))
            while block := stream.read(COPY_BYTES):
                yield block
    except OSError as error:
        raise file_error(pipe, "cannot be read", error) from None


def _is_pipe(name: str) -> bool:
    path = Path(name)
    return name == STANDARD_INPUT or (path.exists() and not path.is_file() and not path.is_dir())
