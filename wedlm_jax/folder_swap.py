"""Writing a folder so that it appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from wedlm_jax.errors import InputError


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
        _sync(folder.parent)
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
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
