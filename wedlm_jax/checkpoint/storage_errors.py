"""Tells damaged files from a storage that fails: what is damaged is set aside, what cannot be
reached now is asked for again and left where it is.

Orbax reads and writes by Python's own files, by gcsfs and by tensorstore, whose errors are all of
one type and say in their text what happened.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

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
