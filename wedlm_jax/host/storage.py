"""Reads and writes files in folders of this machine and in buckets of Google Cloud Storage.

This is the only module that interprets the name of a file or folder. `as_path` returns a `pathlib`
path for a folder and, for ``gs://``, a path with the same methods (`etils.epath` over gcsfs), so
code that opens, lists or joins need not distinguish them.

A bucket has neither renames nor folders: an object appears whole when its upload ends, and a
"folder" is a prefix of names. What must appear whole or not at all is copied into its place with
one file last, and readers treat it as absent without that file (`move_tree`).

Damaged data is distinguished from failing storage (`is_of_storage`): damaged data is set aside; if
storage fails, the read is retried (`retried`) and the data is left alone. Orbax reads and writes
through Python's own files, gcsfs and tensorstore. Tensorstore's errors are all of one type, and
only their text says what happened.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar, cast

from wedlm_jax.errors import InputError, StorageFailure, require_extra, shortened

REMOTE = "gs"
READ_BYTES = 32 * 1024**2
"""Bytes per request to a bucket: even a small request takes long."""
UPLOAD_BYTES = 64 * 1024**2
SAMPLE_BYTES = 64 * 1024

T = TypeVar("T")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def as_path(name: str | os.PathLike[str]) -> Path:
    """Returns the path that a user means.

    Raises:
      InputError: its scheme is not ``gs://``, or the library for that is missing.
    """
    text = os.fspath(name)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return Path(text)
    if scheme.group(1) != REMOTE:
        raise InputError(
            f"{text}: {scheme.group(1)}:// is not supported; give a folder, which may be a "
            f"mounted bucket, or {REMOTE}://BUCKET/NAME"
        )
    require_extra(f"{REMOTE}://", "gcs", "gcsfs")
    import fsspec
    from etils import epath

    # Other hosts write, too: a cached listing would hide what they wrote.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    # `pathlib` collapses two slashes into one, which is repaired here.
    return cast(Path, epath.Path(f"{REMOTE}://{text[scheme.end() :]}"))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path from `as_path` is in a bucket."""
    return os.fspath(path).startswith(f"{REMOTE}:/")


def cache_folder() -> Path:
    """Returns the folder in the user's cache folder for data that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wedlm-jax"


def folder_of_this_machine(name: str | os.PathLike[str], what: str) -> Path:
    """Returns a path that must not be in a bucket; ``what`` is its role, such as "data.sources".

    Raises:
      InputError: it is in a bucket.
    """
    path = as_path(name)
    if is_remote(path):
        raise InputError(
            f"{path}: {what} cannot be in a bucket; copy it to every host (gcloud storage cp -r) "
            "or mount the bucket (gcsfuse)"
        )
    return path


def why_absent(folder: Path, name: str) -> str:
    """Returns a message that ``folder`` lacks the file ``name``, or does not exist."""
    return f"{folder}: no {name} in this folder" if folder.exists() else f"{folder}: no such folder"


def absolute(path: Path) -> Path:
    """Returns the absolute path; a path in a bucket is returned unchanged."""
    return path if is_remote(path) else path.resolve()


def open_new(path: Path) -> IO[bytes]:
    """Opens a file to write from its start. In a bucket it appears when it is closed, even after an
    error; use `upload` for what must not appear in part."""
    if is_remote(path):
        return cast(IO[bytes], _files().open(str(path), "wb", block_size=UPLOAD_BYTES))
    return path.open("wb")


def upload(path: Path, content: bytes) -> None:
    """Writes an object of a bucket, which appears whole.

    Raises:
      InputError: there is no such bucket, or no permission.
      StorageFailure: the bucket refuses or does not answer.
    """
    try:
        _files().pipe_file(str(path), content)
    except Exception as error:
        raise bucket_error(path, "cannot be written", error) from None


def bucket_error(path: Path, what: str, error: Exception) -> InputError | StorageFailure:
    """Returns the error to raise for an error of a bucket's client, of which there are many types,
    including those of credentials; see `wedlm_jax.errors.file_error`."""
    refused = type(error).__name__ == "DefaultCredentialsError" or getattr(error, "code", None) in (
        401,
        403,
    )
    lasting = refused or isinstance(error, FileNotFoundError | PermissionError)
    reason = shortened(str(error) or type(error).__name__)
    return (InputError if lasting else StorageFailure)(f"{path}: {what} ({reason})")


def copy_file(source: Path, destination: Path) -> None:
    """Copies a small file between any two places."""
    destination.write_bytes(source.read_bytes())


def file_sizes(folder: Path) -> dict[str, int]:
    """Returns the bytes of each file in a folder and its subfolders, by its path in the folder."""
    if is_remote(folder):
        root = f"{_without_scheme(folder)}/"
        found = _files().find(str(folder), detail=True)
        return {name.removeprefix(root): file["size"] for name, file in found.items()}
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def sampled(path: Path, samples: int) -> Iterator[bytes]:
    """Yields evenly spread pieces of a file, the first and the last included; a file that is not
    larger than all of them is yielded whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= samples * SAMPLE_BYTES:
            yield file.read()
            return
        for i in range(samples):
            file.seek((size - SAMPLE_BYTES) * i // (samples - 1))
            yield file.read(SAMPLE_BYTES)


def source_digest(*packages: ModuleType) -> str:
    """Returns a digest of the source files of these packages, in hexadecimal digits."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def remove_tree(folder: Path) -> None:
    """Removes everything under a name in a bucket, if there is anything."""
    names = _files().find(str(folder))
    if names:
        _files().rm(names)


def move_tree(source: Path, destination: Path, last: str) -> None:
    """Moves everything under one name in a bucket to another, replacing what is there.

    The file ``last`` of the destination is removed first and copied last, so readers that treat a
    folder without it as absent never see half of one. The source is removed at the very end, so the
    next call can redo one that was killed.
    """
    files, root = _files(), _without_scheme(source)
    names = [name[len(root) + 1 :] for name in files.find(str(source))]
    if (destination / last).exists():
        (destination / last).unlink()
    remove_tree(destination)
    for name in sorted(names, key=lambda name: (name == last, name)):
        files.cp_file(f"{source}/{name}", f"{destination}/{name}")
    remove_tree(source)


class ByteRanges:
    """A file that is read by byte offset; it stays open, so that later reads see the same file.

    Raises:
      FileNotFoundError: there is no such file.
    """

    def __init__(self, path: Path):
        self._name: str | None = None
        if is_remote(path):
            self._name, self.size = str(path), int(_files().info(str(path))["size"])
            return
        self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        self.size = os.fstat(self._handle).st_size

    def read_into(self, view: memoryview, offset: int) -> int:
        """Reads bytes from ``offset`` on into ``view``; returns how many, 0 at the end."""
        if self._name is None:
            return os.preadv(self._handle, [view], offset)
        if offset >= self.size:
            return 0
        end = min(offset + min(len(view), READ_BYTES), self.size)
        content = _files().cat_file(self._name, start=offset, end=end)
        view[: len(content)] = content
        return len(content)


def _files() -> Any:
    import fsspec

    return fsspec.filesystem("gcs")


def _without_scheme(path: Path) -> str:
    return str(path).removeprefix(f"{REMOTE}://").rstrip("/")


# --- storage that fails -------------------------------------------------------------------

PAUSES_S = (2.0, 10.0)
"""Pauses between attempts to read. A bucket's client tries several times within each attempt."""

_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_CLIENTS = {"aiohttp", "gcsfs", "google", "requests", "urllib3"}
"""Packages whose own exceptions concern networks and permissions; for a missing object they, too,
raise Python's `FileNotFoundError`."""
_STATUS = re.compile(
    r"(UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED"
    r"|ABORTED|CANCELLED|INTERNAL|UNKNOWN): "
)
"""The start of tensorstore's messages when it got no bytes. Wrong bytes give DATA_LOSS,
OUT_OF_RANGE, FAILED_PRECONDITION or INVALID_ARGUMENT, missing ones NOT_FOUND."""
_ERRNO = re.compile(r"os_error_code='(\d+)'")


def is_of_storage(error: BaseException) -> bool:
    """Returns whether an error, or one that led to it, comes from failing storage."""
    return any(map(_is_of_storage, _chain(error)))


def storage_message(error: BaseException) -> str:
    """Returns the storage's own message, or else the error's, on one line."""
    first = next(filter(_is_of_storage, _chain(error)), error)
    # Tensorstore appends how the array was opened.
    text = str(first).split(" [tensorstore_spec")[0].split(" [source locations")[0]
    return shortened(text or type(first).__name__, 300)


def retried(folder: Path, read: Callable[[], T]) -> T:
    """Returns the result of ``read``, which is retried, with a message, if the storage fails.

    Args:
      folder: the folder that is read; it counts as damaged only if its files can be opened.

    Raises:
      StorageFailure: the last attempt failed, too.
      Exception: any other error of ``read``.
    """
    for pause in (*PAUSES_S, None):
        try:
            return _reached(folder, read)
        except Exception as error:
            if not is_of_storage(error):
                raise
            reason = storage_message(error)
        if pause is None:
            break
        print(f"{folder}: {reason}; retrying in {pause:g} s", file=sys.stderr, flush=True)
        time.sleep(pause)
    raise StorageFailure(f"{folder}: cannot be read, and is left as it is ({reason})")


def _reached(folder: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as error:
        if not is_of_storage(error):
            # A file that cannot be reached looks like one that does not exist.
            _open_all(folder)
        raise


def _open_all(folder: Path) -> None:
    """Opens all files in a folder, and raises the storage's error if it refuses."""
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
