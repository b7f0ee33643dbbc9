"""Writes files and folders that appear whole or not at all, and survive a loss of power.

In a bucket (`wedlm_jax.host.storage`) a file is an object, which always appears whole; a folder is
copied into its place with its ``config.json`` last, and counts as absent without that file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from wedlm_jax.errors import InputError, file_error
from wedlm_jax.host.storage import absolute, as_path, is_remote, move_tree, remove_tree, upload

LAST = "config.json"
"""The file that a folder in a bucket has only when all its other files are there."""


def writer_name() -> str:
    """Returns a name that no other process gives to its files, on any host."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def check_writable(path: Path, called: str = "") -> None:
    """Refuses a path at which no file can be written, before the work that produces the file. Users
    name it with ``called``, such as an option.

    Raises:
      InputError, StorageFailure: it is a folder, its folder does not exist, or no file can be
        written there.
    """
    shown, folder = f"{called} {path}".strip(), path.resolve().parent
    if path.is_dir():
        raise InputError(f"{shown}: is a folder; expected a file to write")
    if not folder.is_dir():
        raise InputError(f"{shown}: no such folder to write it in")
    with naming(shown), tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def written_beside(path: Path, beside: Path | None = None) -> Iterator[IO[bytes]]:
    """Opens a new file that gets the name ``path`` when the block has succeeded and all of it is on
    disk. Until then it is in the folder ``beside`` (by default the same), under a unique name.

    Raises:
      InputError, StorageFailure: it cannot be written; see `naming`.
    """
    if is_remote(path):
        content = io.BytesIO()
        yield content
        upload(path, content.getvalue())
        return
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
    """Writes an indented JSON file, whole or not at all."""
    with written_beside(path, beside) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2).encode("utf-8") + b"\n")


def create_json(path: Path, value: Any) -> bool:
    """Writes a whole JSON file unless the name exists; returns whether it did. If several processes
    call this, on any hosts, exactly one writes.

    Raises:
      InputError, StorageFailure: it cannot be written; see `naming`.
    """
    temporary = path.parent / f"{path.name}.{writer_name()}.tmp"
    with naming(path):
        try:
            write_json(temporary, value)
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                # A file system without links, such as a mounted bucket: the file does not appear
                # whole, but still only one process creates it.
                with path.open("xb") as file:
                    file.write(temporary.read_bytes())
                    sync(file)
            sync_path(path.parent)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
    return True


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
    """Waits until no other process is in such a block for ``folder``; does not wait on a file
    system without locks."""
    descriptor = lock_folder(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lock_folder(folder: Path, kind: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> int | None:
    """Returns a descriptor of ``folder``. Until it is closed, or the process ends, no other process
    gets one. None on a file system without locks.

    Raises:
      BlockingIOError: another process has it; with ``fcntl.LOCK_EX`` as ``kind`` this waits.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


@contextlib.contextmanager
def naming(path: object, refused: str = "cannot be written") -> Iterator[None]:
    """Turns the file system's refusal of what ``path`` is opened for into an error that names it.

    Raises:
      StorageFailure: the refusal may be temporary, as with a full disk.
      InputError: it is permanent, as with a missing folder.
    """
    try:
        yield
    except OSError as error:
        raise file_error(path, refused, error) from None


@contextlib.contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """Makes a new folder to write in, which gets the name ``folder`` when the block succeeds.

    The new folder is next to the old one, so that the last step is a rename on one file system,
    after everything is on disk. The old content is removed last. A failure leaves ``folder`` as it
    was. So does a kill, except between two renames, when the old content is under a hidden name;
    the next call puts it back.

    Raises:
      InputError: ``folder`` is a file, or cannot be written in this place.
      StorageFailure: the disk is full, or does not answer.
    """
    folder, beside = absolute(as_path(folder)), part_folder(folder)
    if is_remote(folder):
        remove_tree(beside)
        yield beside
        move_tree(beside, folder, LAST)
        return
    old = folder.with_name(f".{folder.name}.wedlm-old")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; expected a folder to write")
    with naming(folder, "cannot be written here"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _recover(folder, old)
        if beside.exists():
            shutil.rmtree(beside)
        beside.mkdir()
    try:
        yield beside
        with naming(folder):
            for path in (*beside.rglob("*"), beside):
                sync_path(path)
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
    """Returns the hidden folder in which the new content of ``folder`` is written."""
    folder = absolute(as_path(folder))
    return folder.with_name(f".{folder.name}.wedlm-part")


def _recover(folder: Path, old: Path) -> None:
    """Undoes a replacement that was killed between its two renames."""
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    elif old.exists():
        shutil.rmtree(old)
