"""Finished records of an unfinished shard, kept on disk as they come.

The first line identifies the job; after it comes a line for each finished record, in the order in
which they were finished:

    {"wedlm_generate": 4, "job": "...", "shard": 3}
    {"row": 3017, "result": {"id": "q-17", "text": ...}}

Only complete lines count: a process may be killed in the middle of one. Every process writes a file
of its own and takes over what killed ones left. So even if two processes work on one shard, on a
file system without locks, nothing is damaged.
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

from infer.job.result_record import encoded
from wedlm_jax.host.atomic import naming, sync, writer_name

FORMAT = 4
"""Records in another format come from another decoder, whose counts of forwards may differ."""
SUFFIX = ".part"
RESULT = b', "result": '

SYNC_SECONDS = 2.0
"""Seconds of records that a crash of the machine may lose. The death of a process loses nothing."""


OPEN_FILES = 2**14
"""A shard's file is open and locked while records of it are being decoded: with few records a
shard, that may be thousands of files."""


def allow_open_files() -> None:
    """Raises the limit of open files: many systems allow a few hundred, and more on request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class InUse(Exception):
    """Another process is writing records of this shard."""


class PartFile:
    """The finished records of an unfinished shard, on disk, to which more are appended.

    Args:
      folder: of the part files.
      name: of the shard.
      header: identifies the job; JSON values. Records under another header are dropped.
      numbers: of the shard's records.

    Raises:
      InUse: another process is writing it.
      InputError: it cannot be written.
    """

    def __init__(self, folder: Path, name: str, header: dict[str, Any], numbers: range):
        self.path = folder / f"{name}.{writer_name()}{SUFFIX}"
        self._numbers, self._synced = numbers, time.monotonic()
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
        """The numbers of the records that it holds."""
        return set(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_whole(self) -> bool:
        return len(self._places) == len(self._numbers)

    def add(self, results: dict[int, dict[str, Any]]) -> None:
        """Appends finished records by their numbers; from then on the death of this process cannot
        lose them."""
        with naming(self.path):
            self._file.seek(self._end)
            for number, record in results.items():
                self._append(number, encoded(record))
            self._file.flush()
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                sync(self._file)
                self._synced = time.monotonic()

    def lines(self) -> Iterator[bytes]:
        """Yields the records in order, as lines without line ends."""
        for number in self._numbers:
            place, length = self._places[number]
            self._file.seek(place)
            yield self._file.read(length)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            sync(self._file)
        # Tries once more what `add` could not write, and has reported.
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
        for number, text in whole_records(file):
            if number in self._numbers and number not in self._places:
                self._append(number, text)


def whole_records(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields number and result of each record after the header, up to a truncated one."""
    for line in file:
        entry = _parsed(line)
        number = entry.get("row") if isinstance(entry, dict) else None
        if not isinstance(number, int) or RESULT not in line:
            return  # what follows is decoded again
        yield number, line[line.index(RESULT) + len(RESULT) : -len(b"}\n")]


def _left(folder: Path, name: str) -> Iterator[contextlib.AbstractContextManager[IO[bytes]]]:
    """Opens the part files that dead processes have left of a shard."""
    for path in sorted(folder.glob(f"{name}.*{SUFFIX}")):
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            continue  # its writer has just completed the shard
        if not _lock(file):
            file.close()
            raise InUse(name)
        yield file


def _lock(file: IO[bytes]) -> bool:
    """Locks a file; returns False if another process holds it. Without locks in the file system it
    always returns True."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _parsed(line: bytes) -> Any:
    """Parses a complete line of JSON; returns None if it is truncated or not JSON."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
