"""What a job reads: files, folders and pipes, as one list of files that can be read twice."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from wedlm_jax.atomic import naming, writer_name
from wedlm_jax.errors import InputError

JSONL, PARQUET = "jsonl", "parquet"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
STANDARD_INPUT = "-"
SPOOL = "spooled-"
COPY_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class InputFile:
    """A file of rows.

    Attributes:
      path: where its bytes are now.
      shown: what messages call it: as the user named it.
      name: what error rows call it: its path below the folder that holds all the input, so
        that the input may be moved as a whole.
      kind: `JSONL` or `PARQUET`.
    """

    path: Path
    shown: str
    name: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Source:
    """What ``--input`` names, before any of it is read.

    Attributes:
      files: in the order of their rows; none where there is a pipe.
      pipe: standard input or a named pipe, which can be read once.
      others: files in the folders that are neither JSONL nor Parquet.
      folders: the folders that were searched.
    """

    files: tuple[InputFile, ...]
    pipe: str | None = None
    others: int = 0
    folders: tuple[Path, ...] = ()

    @property
    def shown(self) -> str:
        """In a message: the one file, or what else there is."""
        if self.pipe is not None:
            return "standard input" if self.pipe == STANDARD_INPUT else self.pipe
        return self.files[0].shown if len(self.files) == 1 else "the input"


def find_input(names: Sequence[str]) -> Source:
    """Files as they are named, folders searched in sorted order.

    Raises:
      InputError: naming what does not exist, cannot be read, or does not go together.
    """
    paths: list[Path] = []
    folders: list[Path] = []
    others = 0
    pipes = [name for name in names if _is_pipe(name)]
    if pipes:
        if len(names) > 1:
            raise InputError(f"{pipes[0]}: a pipe is read alone, without other input")
        return Source((), pipe=pipes[0])
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
            readable = [p for p in inside if p.suffix.lower() in (".jsonl", ".parquet")]
            if not readable:
                raise InputError(f"{path}: no .jsonl or .parquet file is in this folder")
            paths += readable
            others += len(inside) - len(readable)
            folders.append(path)
        elif not path.exists():
            raise InputError(f"{path}: no such file or folder")
        else:
            paths.append(path)
    _check_each_once(paths)
    top = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    files = tuple(
        InputFile(path, str(path), path.absolute().relative_to(top).as_posix(), _kind(path))
        for path in paths
    )
    if any(file.kind == PARQUET for file in files):
        from wedlm_jax.parquet import require_pyarrow

        require_pyarrow()
    return Source(files, others=others, folders=tuple(folders))


def spool(pipe: str, folder: Path) -> InputFile:
    """Keeps what a pipe says, JSONL, in ``folder``: the job reads its rows more than once.

    Raises:
      InputError: it cannot be read or kept.
    """
    digest = hashlib.sha256()
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        arriving = folder / f"{SPOOL}{writer_name()}.tmp"
        try:
            with arriving.open("xb") as file:
                for block in _blocks(pipe):
                    digest.update(block)
                    file.write(block)
            # Named by what it holds, so that another job's is never written over.
            path = folder / f"{SPOOL}{digest.hexdigest()[:16]}.jsonl"
            os.replace(arriving, path)
        except BaseException:
            arriving.unlink(missing_ok=True)
            raise
    shown = "standard input" if pipe == STANDARD_INPUT else pipe
    return InputFile(path, shown, shown, JSONL)


def file_size(file: InputFile) -> int:
    """In bytes.

    Raises:
      InputError: it is not there.
    """
    with reading(file):
        return file.path.stat().st_size


@contextlib.contextmanager
def reading(file: InputFile) -> Iterator[None]:
    """Names ``file`` where the file system refuses to read it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{file.shown}: cannot be read ({error.strerror})") from None


def _blocks(pipe: str) -> Iterator[bytes]:
    try:
        with contextlib.ExitStack() as opened:
            stream: IO[bytes] = sys.stdin.buffer
            if pipe != STANDARD_INPUT:
                stream = opened.enter_context(open(pipe, "rb"))
            while block := stream.read(COPY_BYTES):
                yield block
    except OSError as error:
        raise InputError(f"{pipe}: cannot be read ({error.strerror})") from None


def _is_pipe(name: str) -> bool:
    path = Path(name)
    return name == STANDARD_INPUT or (path.exists() and not path.is_file() and not path.is_dir())


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        raise InputError(f"{path}: is compressed; unpack it, or pipe what it holds to --input -")
    return PARQUET if suffix == ".parquet" else JSONL


def _check_each_once(paths: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for path in paths:
        first = seen.setdefault(path.resolve(), path)
        if first is not path:
            raise InputError(f"{path}: is named twice as input")


def _hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)
