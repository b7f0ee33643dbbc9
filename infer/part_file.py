"""Finished rows of a job, kept beside its output until all are there.

The file begins with a line that says which job it belongs to; after that, a line for each
finished row, in the order in which they were finished:

    {"wedlm_generate": 1, "fingerprint": "...", "rows": 1000}
    {"row": 17, "result": {"id": "q-17", "text": ...}}

Only what ends in a line end counts: a process may be killed within a line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wedlm_jax.errors import InputError

FORMAT = 1
SUFFIX = ".part"
RESULT = b', "result": '


class PartFile:
    """The rows finished so far, on disk, and open to take more.

    Args:
      output: what the file becomes in the end; the part file stands beside it.
      fingerprint: of the job. Rows of another are dropped.
      rows: how many the job has.

    Attributes:
      path: of the part file.
      total: how many rows the job has.
      done: numbers of the rows it holds.
      dropped: how many rows of another job it held.

    Raises:
      InputError: it cannot be written, or another process is writing it.
    """

    def __init__(self, output: Path, fingerprint: str, rows: int):
        self.output, self.path = output, part_path(output)
        self.dropped, self.total = 0, rows
        self._header = {"wedlm_generate": FORMAT, "fingerprint": fingerprint, "rows": rows}
        self._places: dict[int, tuple[int, int]] = {}
        with self._naming_itself():
            self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            try:
                self._begin()
            except BaseException:
                self._file.close()
                raise

    @property
    def done(self) -> set[int]:
        return set(self._places)

    def add(self, results: dict[int, dict[str, Any]]) -> None:
        """Appends finished rows by their numbers; when this returns they are on the disk."""
        with self._naming_itself():
            for number, result in results.items():
                before = b'{"row": %d' % number + RESULT
                text = json.dumps(result, ensure_ascii=False).encode("utf-8")
                self._places[number] = (self._end + len(before), len(text))
                self._end += self._file.write(before + text + b"}\n")
            self._sync()

    def finish(self) -> None:
        """Puts the rows in order into the output, which appears whole, and removes this file."""
        assert len(self._places) == self.total, "rows are missing"
        ordered = self.path.with_name(self.path.name + ".ordered")
        with self._naming_itself():
            with ordered.open("wb") as out:
                for number in range(len(self._places)):
                    place, length = self._places[number]
                    self._file.seek(place)
                    out.write(self._file.read(length) + b"\n")
                out.flush()
                os.fsync(out.fileno())
            os.replace(ordered, self.output)
            _sync_folder(self.output.parent)
            self.path.unlink()
        self.close()

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> None:
        self._lock()
        self._end = self._take_over()
        self._file.seek(self._end)
        self._file.truncate()
        if not self._end:
            self._end = self._file.write(json.dumps(self._header).encode() + b"\n")
        self._sync()

    def _take_over(self) -> int:
        """Finds the rows of this job; returns where the last whole one ends."""
        first = self._file.readline()
        header = _parsed(first)
        if header != self._header:
            cut_off = b'{"wedlm_generate"'.startswith(first[:17]) and not first.endswith(b"\n")
            if not cut_off and not (isinstance(header, dict) and "wedlm_generate" in header):
                raise InputError(f"{self.path}: not the part file of a job; move it away")
            self.dropped = sum(line.endswith(b"\n") for line in self._file)
            return 0
        end = len(first)
        for line in self._file:
            entry = _parsed(line)
            number = entry.get("row") if isinstance(entry, dict) else None
            if not isinstance(number, int) or number not in range(self.total) or RESULT not in line:
                break  # cut off in the middle of writing; what is behind it is done again
            start = line.index(RESULT) + len(RESULT)
            self._places[number] = (end + start, len(line) - start - len(b"}\n"))
            end += len(line)
        return end

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self.path}: another process is writing it") from None
        except OSError:
            pass  # a file system without locks: then nothing can be told

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _naming_itself(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from None


def part_path(output: Path) -> Path:
    """Where the finished rows of a job are kept: OUTPUT.part."""
    return output.with_name(output.name + SUFFIX)


def _parsed(line: bytes) -> Any:
    """The JSON of a whole line; None where it is cut off or no JSON."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _sync_folder(folder: Path) -> None:
    """Makes a rename within ``folder`` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
