"""Finished rows of an unfinished shard, kept on disk as they come.

The file begins with a line that says whose rows these are; after that, a line for each
finished row, in the order in which they were finished:

    {"wedlm_generate": 2, "job": "...", "shard": 3}
    {"row": 3017, "result": {"id": "q-17", "text": ...}}

Only what ends in a line end counts: a process may be killed within a line. Every process
writes a file of its own, and takes over what others have left: so two that should work on one
shard, where no lock can keep them apart, spoil nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from infer.job.result_rows import encoded
from wedlm_jax.atomic import naming, sync, writer_name

FORMAT = 3
"""Rows of another number are of another decoder, whose counts of forwards may differ."""
SUFFIX = ".part"
RESULT = b', "result": '

SYNC_SECONDS = 2.0
"""What a crash of the machine may cost. The end of a process costs nothing that was added."""


OPEN_FILES = 2**14
"""A shard's file is open, and locked, while rows of it are under way or wait for others of their
kind: that may be thousands of shards of few rows."""


def allow_open_files() -> None:
    """Many systems let a process open a few hundred files, and more when it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class InUse(Exception):
    """Another process is writing rows of this shard."""


class PartFile:
    """The rows finished so far of one shard, on disk, and open to take more.

    Args:
      folder: where part files are.
      name: of the shard.
      header: whose rows these are; JSON values. Rows under another header are dropped.
      rows: the numbers of the shard's rows.

    Raises:
      InUse: another process is at it.
      InputError: it cannot be written.
    """

    def __init__(self, folder: Path, name: str, header: dict[str, Any], rows: range):
        self.path = folder / f"{name}.{writer_name()}{SUFFIX}"
        self._rows, self._synced = rows, time.monotonic()
        self._header = {"wedlm_generate": FORMAT, **header}
        self._places: dict[int, tuple[int, int]] = {}
        with contextlib.ExitStack() as others, naming(self.path):
            left = [others.enter_context(file) for file in _left(folder, name)]
            self._file = self.path.open("x+b")
            try:
                if not _lock(self._file):
                    raise InUse(name)
                self._end = self._file.write(json.dumps(self._header).encode() + b"\n")
                for file in left:
                    self._take_over(file)
                sync(self._file)
            except BaseException:
                self.remove()
                raise
            for file in left:
                Path(file.name).unlink(missing_ok=True)

    @property
    def done(self) -> set[int]:
        """Numbers of the rows it holds."""
        return set(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_whole(self) -> bool:
        return len(self._places) == len(self._rows)

    def add(self, results: dict[int, dict[str, Any]]) -> None:
        """Appends finished rows by their numbers; no end of this process loses them then."""
        with naming(self.path):
            self._file.seek(self._end)
            for number, row in results.items():
                self._append(number, encoded(row))
            self._file.flush()
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                sync(self._file)
                self._synced = time.monotonic()

    def lines(self) -> Iterator[bytes]:
        """The rows in order, as lines without their ends."""
        for number in self._rows:
            place, length = self._places[number]
            self._file.seek(place)
            yield self._file.read(length)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            sync(self._file)
        # What could not be written, as `add` has said, is tried once more here.
        with contextlib.suppress(OSError):
            self._file.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _append(self, number: int, text: bytes) -> None:
        before = b'{"row": %d' % number + RESULT
        self._places[number] = (self._end + len(before), len(text))
        self._end += self._file.write(before + text + b"}\n")

    def _take_over(self, file: IO[bytes]) -> None:
        if _parsed(file.readline()) != self._header:
            return
        for number, text in whole_rows(file):
            if number in self._rows and number not in self._places:
                self._append(number, text)


def whole_rows(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number and result of each row behind the header, up to one that is cut off."""
    for line in file:
        entry = _parsed(line)
        number = entry.get("row") if isinstance(entry, dict) else None
        if not isinstance(number, int) or RESULT not in line:
            return  # what is behind it is done again
        yield number, line[line.index(RESULT) + len(RESULT) : -len(b"}\n")]


def _left(folder: Path, name: str) -> Iterator[contextlib.AbstractContextManager[IO[bytes]]]:
    """What processes that are no more have left of a shard, opened."""
    for path in sorted(folder.glob(f"{name}.*{SUFFIX}")):
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            continue  # its writer has just finished the shard
        if not _lock(file):
            file.close()
            raise InUse(name)
        yield file


def _lock(file: IO[bytes]) -> bool:
    """Whether no other process holds the file; a file system without locks never tells."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _parsed(line: bytes) -> Any:
    """The JSON of a whole line; None where it is cut off or no JSON."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
