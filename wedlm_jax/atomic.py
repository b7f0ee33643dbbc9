"""Writing files and folders that appear whole or not at all, and survive a loss of power."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from wedlm_jax.errors import InputError


def writer_name() -> str:
    """Returns a name that no other process gives to its files, on any host."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def written_beside(path: Path, beside: Path | None = None) -> Iterator[IO[bytes]]:
    """Opens a new file that takes the name ``path`` when the block ends well, after all of it is on
    the disk. Until then it stands in the folder ``beside`` (by default its own), under a name
    that nobody else gives.

    Raises:
      InputError: it cannot be written.
    """
    temporary = (beside or path.parent) / f"{path.name}.{writer_name()}.tmp"
    with naming(path):
        try:
            with temporary.open("xb") as file:
                yield file
                sync(file)
            os.replace(temporary, path)
            sync_path(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any, beside: Path | None = None) -> None:
    """Writes a JSON file for people and programs, whole or not at all."""
    with written_beside(path, beside) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2).encode("utf-8") + b"\n")


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process is in such a block for ``folder``; where the file system
    has no locks, it does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names ``path`` where the file system refuses to write it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """A new folder to write in; when the block ends well, it takes the name ``folder``.

    The new folder stands beside, so that the last step is a rename on one file system,
    after all of it is on disk. What ``folder`` held before is removed last. A failure
    leaves ``folder`` as it was; so does a kill, but for two renames between which the old
    content stands under a hidden name, from where the next call puts it back.

    Raises:
      InputError: ``folder`` is a file, or cannot be written where it is asked for.
    """
    folder, beside = Path(folder).resolve(), part_folder(folder)
    old = folder.with_name(f".{folder.name}.wedlm-old")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, where a folder is to be written")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _recover(folder, old)
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir()
    except OSError as error:
        raise InputError(f"{folder}: cannot be written here ({error.strerror})") from None
    try:
        yield beside
        _sync_tree(beside)
        if folder.exists():
            os.rename(folder, old)
        os.rename(beside, folder)
        sync_path(folder.parent)
    except BaseException:
        _recover(folder, old)
        shutil.rmtree(beside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def part_folder(folder: str | Path) -> Path:
    """Where what is to be ``folder`` is written."""
    folder = Path(folder).resolve()
    return folder.with_name(f".{folder.name}.wedlm-part")


def _recover(folder: Path, old: Path) -> None:
    """Undoes a replacement that was cut off between its two renames."""
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    elif old.exists():
        shutil.rmtree(old)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
