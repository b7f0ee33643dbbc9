"""Where a job writes: a folder of shards, or a file into which they are merged at the end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from infer.job.input import SPOOL, Source
from wedlm_jax.errors import InputError
from wedlm_jax.records.parquet import require_pyarrow

SHARDS_SUFFIX = ".shards"
JSONL, PARQUET = ".jsonl", ".parquet"
OTHER_FILES = (".json", ".txt", ".csv", ".tsv", ".gz", ".zst")


@dataclasses.dataclass(frozen=True)
class Output:
    """Holds what ``--output`` names.

    Attributes:
      shown: as the user named it.
      folder: of the shards.
      file: into which all records are merged; None if the folder itself is the output.
    """

    shown: str
    folder: Path
    file: Path | None

    @property
    def is_parquet(self) -> bool:
        return self.file is not None and self.file.suffix.lower() == PARQUET

    def absolute(self) -> Output:
        """Returns the same output with absolute paths."""
        file = None if self.file is None else self.file.absolute()
        return dataclasses.replace(self, folder=self.folder.absolute(), file=file)


def find_output(name: str, source: Source) -> Output:
    """Finds out what a path means: a file if it ends in .jsonl or .parquet, otherwise a folder.

    Raises:
      InputError: it cannot be written, or would overwrite the input; or pyarrow is missing.
    """
    path = Path(name)
    if path.suffix.lower() in OTHER_FILES:
        raise InputError(f"{path}: expected a folder, or a .jsonl or .parquet file, as output")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: no such folder, {path.parent}")
    if path.suffix.lower() in (JSONL, PARQUET):
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: exists and is not a file")
        if path.suffix.lower() == PARQUET:
            require_pyarrow()
        output = Output(name, path.with_name(path.name + SHARDS_SUFFIX), path)
    else:
        output = Output(name, path, None)
    if output.folder.exists() and not output.folder.is_dir():
        raise InputError(f"{output.folder}: is a file; the output needs a folder of this name")
    _check_apart(output, source)
    return output


def _check_apart(output: Output, source: Source) -> None:
    for file in source.files:
        if output.file is not None and output.file.exists() and output.file.samefile(file.path):
            raise InputError(f"{output.file}: input and output are the same file")
        inside = output.folder.resolve() in file.path.resolve().parents
        if inside and not file.path.name.startswith(SPOOL):
            raise InputError(f"{file.shown}: the input is inside the output folder")
    for path in (output.file, output.folder):
        for folder in source.folders:
            if path is not None and folder.resolve() in (path.resolve(), *path.resolve().parents):
                raise InputError(f"{path}: the output is inside the input folder {folder}")
