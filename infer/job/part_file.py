"""Keeps the finished records of an unfinished shard on disk.

The first line identifies the job; each further line is a record, in the order in which they were
finished:

    {"wedlm_generate": 4, "job": "...", "shard": 3}
    {"row": 3017, "result": {"id": "q-17", "text": ...}}

Only complete lines count: a process may be killed in the middle of one. Every process writes its
own file and takes over the records that killed processes left. So nothing is damaged even if two
processes work on one shard on a file system without locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import resource
import time
from collections.abc import Iterator, KeysView
from pathlib import Path
from typing import IO, Any

from infer.job.result_record import encoded
from wedlm_jax.host.atomic import naming, sync, writer_name

FORMAT = 4
"""Raised when a new decoder counts forwards differently: its records must not mix with old ones."""
SUFFIX = ".part"
RESULT = b', "result": '

SYNC_SECONDS = 2.0
"""Seconds of work that a machine crash may lose. A process that is killed loses nothing."""

OPEN_FILES = 2**14
"""Limit of open files to ask for. A part file is open while records of its shard are decoded: small
shards may need thousands."""


def allow_open_files() -> None:
    """Raises the limit of open files: many systems allow a few hundred, but more on request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class InUse(Exception):
    """Another process is writing records of this shard."""


class PartFile:
    """A file of finished records, to which more are appended.

    Args:
      header: identifies the job, as JSON values. Records under another header are dropped.
      numbers: of the shard's records.

    Raises:
      InUse: another process is decoding the shard.
      InputError: the file cannot be written.
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
    def done(self) -> KeysView[int]:
        """Numbers of the records in the file."""
        return self._places.keys()

    @property
    def is_whole(self) -> bool:
        return len(self._places) == len(self._numbers)

    def add(self, number: int, record: dict[str, Any]) -> None:
        """Appends a finished record, which is then kept even if the process is killed."""
        with naming(self.path):
            self._file.seek(self._end)
            self._append(number, encoded(record))
            self._file.flush()
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                sync(self._file)
                self._synced = time.monotonic()

    def lines(self) -> Iterator[bytes]:
        """Yields the records in order, as JSON without line ends."""
        for number in self._numbers:
            place, length = self._places[number]
            self._file.seek(place)
            yield self._file.read(length)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            sync(self._file)
        # Tries again to write what `add` could not; that was reported then.
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
        if parsed_line(file.readline()) != self._header:
            return
        for number, text in whole_records(file):
            if number in self._numbers and number not in self._places:
                self._append(number, text)


def whole_records(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the JSON of each record after the header, up to a damaged one."""
    for line in file:
        entry = parsed_line(line)
        number = entry.get("row") if isinstance(entry, dict) else None
        if not isinstance(number, int) or RESULT not in line:
            return  # records that follow are decoded again
        yield number, line[line.index(RESULT) + len(RESULT) : -len(b"}\n")]


def _left(folder: Path, name: str) -> Iterator[contextlib.AbstractContextManager[IO[bytes]]]:
    """Opens the part files of a shard that dead processes left."""
    for path in sorted(folder.glob(f"{name}.*{SUFFIX}")):
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            continue  # its writer has just completed the shard
        if not _lock(file):
            file.close()
            raise InUse(name)
        yield file


def any_in_use(folder: Path) -> bool:
    """Returns whether another process is writing a part file in ``folder``."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            if not _lock(file):
                return True
    return False


def _lock(file: IO[bytes]) -> bool:
    """Locks a file; returns False if another process holds the lock. Always returns True on a file
    system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def parsed_line(line: bytes) -> Any:
    """Parses a line of JSON; returns None if it is truncated or not JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line) if line.endswith(b"\n") else None
    return None
