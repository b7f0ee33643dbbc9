"""Tells damaged files from a storage that fails: what is damaged is set aside, what cannot be
reached now is asked for again and left where it is. A failure to write is told to all processes.

Orbax reads and writes by Python's own files, by gcsfs and by tensorstore, whose errors are all of
one type and say in their text what happened.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from wedlm_jax.errors import StorageFailure, shortened
from wedlm_jax.host.storage import file_sizes, is_remote

T = TypeVar("T")

PAUSES_S = (2.0, 10.0)
"""Between attempts to read. The clients of a bucket have tried several times within each."""

_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_CLIENTS = {"aiohttp", "gcsfs", "google", "requests", "urllib3"}
"""Packages whose own exceptions are of networks and permissions; a missing object is Python's
`FileNotFoundError` there, too."""
_STATUS = re.compile(
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED"
    r"|ABORTED|CANCELLED|INTERNAL|UNKNOWN): "
)
"""What tensorstore's messages begin with when the bytes were not had. Bytes that are wrong are
DATA_LOSS, OUT_OF_RANGE, FAILED_PRECONDITION or INVALID_ARGUMENT, absent ones NOT_FOUND."""
_ERRNO = re.compile(r"os_error_code='(\d+)'")


def is_of_storage(error: BaseException) -> bool:
    """Tells whether an error, or one that led to it, is of a storage that fails."""
    return any(map(_is_of_storage, _chain(error)))


def told(error: BaseException) -> str:
    """Returns the storage's own message, or else the error's, on one line."""
    first = next(filter(_is_of_storage, _chain(error)), error)
    # Behind this tensorstore lays out how the array was opened.
    text = str(first).split(" [tensorstore_spec")[0].split(" [source locations")[0]
    return shortened(text or type(first).__name__, 300)


def asked_again(folder: Path, read: Callable[[], T]) -> T:
    """Returns the result of ``read``, which is retried, with a message, where the storage fails.

    Args:
      folder: what is read. What seems damaged counts as damaged only when its files can be opened.

    Raises:
      StorageFailure: it failed at the last attempt, too.
      Exception: any other error of ``read``.
    """
    for pause in (*PAUSES_S, None):
        try:
            return _reached(folder, read)
        except Exception as error:
            if not is_of_storage(error):
                raise
            reason = told(error)
        if pause is None:
            break
        print(f"{folder}: {reason}; asking again in {pause:g} s", file=sys.stderr, flush=True)
        time.sleep(pause)
    raise StorageFailure(f"{folder}: cannot be read, and is left as it is ({reason})")


def _reached(folder: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as error:
        if not is_of_storage(error):
            # Whoever asks whether a file exists is told no where it cannot be reached.
            _open_all(folder)
        raise


def _open_all(folder: Path) -> None:
    """Opens all files in a folder, and raises the error of the storage where it refuses."""
    try:
        if is_remote(folder):
            file_sizes(folder)
            return
        for parent, _, names in os.walk(folder, onerror=_raise):
            for name in names:
                with open(os.path.join(parent, name), "rb") as file:
                    file.read(1)
    except FileNotFoundError:
        return


def _raise(error: OSError) -> None:
    raise error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_storage(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    if type(error).__module__.split(".")[0] in _CLIENTS:
        return True
    if number := _ERRNO.search(str(error)):
        return int(number[1]) not in _MISSING
    return _STATUS.match(str(error)) is not None


class SaveMeetings:
    """Makes the processes wait for one another, as orbax asks; raises in all when one has failed.

    Orbax writes in background threads, which wait for those of the other processes when theirs is
    written, and again when the state counts. In a process whose write failed the thread ends, and
    the others would wait for it until the time is up. But it asks for one more wait as it ends,
    with its error in flight. So here every process has one sequence of meetings a state, whatever
    orbax calls them: one that failed says so, and comes to the meeting at which the others are.

    It is orbax's `AsyncOptions.barrier_sync_fn`.

    Args:
      client: of the service that `jax.distributed` started; None for a process alone.
      index: this process.
      count: of how many.
      name: the same in all of them, and no other's.
    """

    def __init__(self, client: Any, index: int, count: int, name: str):
        self._client, self._index, self._count, self._name = client, index, count, name
        self._state, self._met, self._step = 0, 0, 0
        self._starter = 0
        self._one_at_a_time = threading.Lock()
        self.failure = ""

    def begin(self, step: int) -> None:
        """Begins the next state. Every process calls this, by the thread that starts to write."""
        self._state, self._met, self._step, self.failure = self._state + 1, 0, step, ""
        self._starter = threading.get_ident()

    def note(self, error: BaseException) -> StorageFailure:
        """Returns why the state failed: what a process has reported, or the error of this one."""
        self.failure = self.failure or self.sentence({self._index: told(error)})
        return StorageFailure(self.failure)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        if self._count == 1:
            return
        # The thread that starts to write may itself handle an error, of something else.
        starts = threading.get_ident() == self._starter
        error = None if starts else sys.exception()
        place = f"wedlm/{self._name}/{self._state}"
        if error is not None and not self.failure:
            self._client.key_value_set(f"{place}/failed/{self._index}", told(error), True)
        with self._one_at_a_time:
            if not self.failure:
                self._meet(place, timeout_ms)
        if self.failure and error is None:
            raise StorageFailure(self.failure)

    def _meet(self, place: str, timeout_ms: int) -> None:
        self._met += 1
        try:
            self._client.wait_at_barrier(f"{place}/{self._met}", timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            self.note(error)
            return
        failed = self._client.key_value_dir_get(f"{place}/failed/")
        if failed:
            self.failure = self.sentence({int(name.split("/")[-1]): said for name, said in failed})

    def sentence(self, failed: dict[int, str]) -> str:
        """Returns the message for a state: what the storage said to each process that failed."""
        reasons = [
            f"host {index} of {self._count}: {said}" if self._count > 1 else said
            for index, said in sorted(failed.items())
        ]
        return f"the state of step {self._step} could not be written ({'; '.join(reasons)})"
