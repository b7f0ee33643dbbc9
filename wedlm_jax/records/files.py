"""Finds files of records in folders, in a fixed order; a file's ending determines its kind."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import naming
from wedlm_jax.records.parquet import require_pyarrow

JSONL, PARQUET = "jsonl", "parquet"


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A file of records.

    Attributes:
      path: where its bytes are now.
      shown: its name in messages, as the user gave it.
      name: its path below the folder that holds all the input, so that the input may be moved as
        a whole.
      kind: `JSONL`, `PARQUET`, or another kind that its reader knows.
    """

    path: Path
    shown: str
    name: str
    kind: str


@dataclasses.dataclass(frozen=True)
class FoundFiles:
    """The files found in the places that the user named.

    Attributes:
      files: in the order of their records.
      others: files in the searched folders with other endings, which are not read.
      folders: the folders that were searched.
    """

    files: tuple[RecordFile, ...]
    others: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()


def find_files(
    names: Sequence[str], endings: Mapping[str, str], *, otherwise: str | None = None
) -> FoundFiles:
    """Finds files, searching folders in sorted order; hidden files and folders are skipped.

    Args:
      names: files and folders, at least one.
      endings: the kind of a file by the ending of its name, in lower case.
      otherwise: the kind of a file in ``names`` that has another ending; None refuses such a file.

    Raises:
      InputError: an input does not exist, has an unknown ending, or is a folder without files to
        read, or pyarrow is missing; the message names it.
    """
    found: list[tuple[Path, str]] = []
    others: list[Path] = []
    folders: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
            kinds = [(p, _kind(p, endings)) for p in inside]
            if not any(kind for _, kind in kinds):
                raise InputError(f"{path}: no {_either(endings)} file is in this folder")
            found += [(p, kind) for p, kind in kinds if kind is not None]
            others += [p for p, kind in kinds if kind is None]
            folders.append(path)
        elif not path.exists():
            raise InputError(f"{path}: no such file or folder")
        else:
            kind = _kind(path, endings) or otherwise
            if kind is None:
                raise InputError(f"{path}: expected a {_either(endings)} file")
            found.append((path, kind))
    if any(kind == PARQUET for _, kind in found):
        require_pyarrow()
    top = Path(os.path.commonpath([path.absolute().parent for path, _ in found]))
    files = tuple(
        RecordFile(path, str(path), path.absolute().relative_to(top).as_posix(), kind)
        for path, kind in found
    )
    return FoundFiles(files, tuple(others), tuple(folders))


def file_size(file: RecordFile) -> int:
    """Returns the file's size in bytes.

    Raises:
      InputError: it does not exist.
    """
    with reading(file):
        return file.path.stat().st_size


def reading(file: RecordFile) -> AbstractContextManager[None]:
    """Turns the file system's refusal to read ``file`` into an error that names it."""
    return naming(file.shown, "cannot be read")


def _kind(path: Path, endings: Mapping[str, str]) -> str | None:
    name = path.name.lower()
    return next((kind for ending, kind in endings.items() if name.endswith(ending)), None)


def _either(endings: Mapping[str, str]) -> str:
    *most, last = endings
    return f"{', '.join(most)} or {last}" if most else last


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)
