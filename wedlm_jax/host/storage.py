"""Where files lie: in folders of this machine, or in buckets of Google Cloud Storage.

The one place that knows what the name of a file or folder means. A path from `as_path` is
`pathlib`'s for a folder, and for ``gs://`` one with the same methods (`etils.epath` over gcsfs),
so whoever opens, lists or joins does not ask which it is.

A bucket has no renames, and no folders: an object appears whole when its upload ends, and a
"folder" is the beginning of names. What has to appear whole or not at all there is copied into its
place with one file last, without which readers take it for absent (`move_tree`).
"""

from __future__ import annotations

import hashlib
import os
import re
import weakref
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from wedlm_jax.errors import InputError, StorageFailure, require_extra, shortened

REMOTE = "gs"
READ_BYTES = 32 * 1024**2
"""What one request to a bucket brings: a request takes its time however little it brings."""
UPLOAD_BYTES = 64 * 1024**2

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def as_path(name: str | os.PathLike[str]) -> Path:
    """Returns the path that a user means.

    Raises:
      InputError: a scheme that is neither a folder nor ``gs://``, or the library for it is
        missing.
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

    # Other hosts write, too: a listing kept from before would hide what they wrote.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    # `pathlib` makes one slash of two, so a path that has been through it is mended here.
    return cast(Path, epath.Path(f"{REMOTE}://{text[scheme.end() :]}"))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path from `as_path` is in a bucket."""
    return os.fspath(path).startswith(f"{REMOTE}:/")


def cache_folder() -> Path:
    """Returns the folder in the user's cache folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wedlm-jax"


def folder_of_this_machine(name: str | os.PathLike[str], what: str) -> Path:
    """Returns a path that must not be in a bucket.

    Args:
      what: it is, for the message: "data.sources".

    Raises:
      InputError: it is in one.
    """
    path = as_path(name)
    if is_remote(path):
        raise InputError(
            f"{path}: {what} cannot be in a bucket; copy it to every host (gcloud storage cp -r) "
            "or mount the bucket (gcsfuse)"
        )
    return path


def why_absent(folder: Path, name: str) -> str:
    """Raised when ``folder`` lacks the file ``name``, or that there is no such folder."""
    return f"{folder}: no {name} in this folder" if folder.exists() else f"{folder}: no such folder"


def absolute(path: Path) -> Path:
    """Returns the same path from the root of where it lies."""
    return path if is_remote(path) else path.resolve()


def open_new(path: Path) -> IO[bytes]:
    """Opens a file to write from its start. In a bucket it appears when it is closed, whatever
    has happened; see `upload` for what must not appear in part."""
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
    """Returns the error to raise for what a bucket's client says, whose errors are of many types,
    its credentials' among them; see `wedlm_jax.errors.file_error`."""
    refused = type(error).__name__ == "DefaultCredentialsError" or getattr(error, "code", None) in (
        401,
        403,
    )
    lasting = refused or isinstance(error, FileNotFoundError | PermissionError)
    reason = shortened(str(error) or type(error).__name__)
    return (InputError if lasting else StorageFailure)(f"{path}: {what} ({reason})")


def copy_file(source: Path, destination: Path) -> None:
    """Copies a small file, from and to wherever."""
    destination.write_bytes(source.read_bytes())


def file_sizes(folder: Path) -> dict[str, int]:
    """Returns the bytes of each file in a folder and in those within it, by its name from there."""
    if is_remote(folder):
        root = f"{_without_scheme(folder)}/"
        found = _files().find(str(folder), detail=True)
        return {name.removeprefix(root): file["size"] for name, file in found.items()}
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def source_digest(*packages: ModuleType) -> str:
    """Returns a digest of the source files of these packages, in hexadecimal digits."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def remove_tree(folder: Path) -> None:
    """Removes what is in a bucket under a name, if there is anything."""
    names = _files().find(str(folder))
    if names:
        _files().rm(names)


def move_tree(source: Path, destination: Path, last: str) -> None:
    """Makes what lies under one name of a bucket that which lies under another.

    The file ``last`` of the destination is removed before anything else is, and copied after all
    else: who takes a folder without it for absent never sees half of one. The source is removed at
    the very end, so a call that was killed is done again by the next.
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
    """A file whose bytes are read by place; kept open, so that what is read later is this file.

    Raises:
      FileNotFoundError: there is none.
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
