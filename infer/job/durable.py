"""Files that appear whole or not at all, and stay when the machine loses its power."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from wedlm_jax.errors import InputError


def writer_name() -> str:
    """A name that no other process gives to its files, on any host."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def written_beside(path: Path, beside: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the name ``path`` when the block ends well, after all of it is on
    the disk. Until then it stands in the folder ``beside``, under a name of its own.

    Raises:
      InputError: it cannot be written.
    """
    temporary = beside / f"{path.name}.{writer_name()}.tmp"
    with naming(path):
        try:
            with temporary.open("xb") as file:
                yield file
                sync(file)
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any, beside: Path) -> None:
    """Writes a JSON file for people and programs, whole or not at all."""
    with written_beside(path, beside) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2).encode("utf-8") + b"\n")


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes a rename within ``folder`` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
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
