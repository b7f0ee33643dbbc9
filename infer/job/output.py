"""Where a job writes: a folder of shards, or a file that they become in the end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from infer.job.source import SPOOL, Source
from wedlm_jax.errors import InputError

SHARDS_SUFFIX = ".shards"
OTHER_FILES = (".json", ".txt", ".csv", ".tsv", ".parquet", ".gz", ".zst")


@dataclasses.dataclass(frozen=True)
class Output:
    """What ``--output`` names.

    Attributes:
      shown: as the user named it.
      folder: of the shards.
      file: that all rows are put together in; None where the folder itself is asked for.
    """

    shown: str
    folder: Path
    file: Path | None

    def absolute(self) -> Output:
        """The same from any folder."""
        file = None if self.file is None else self.file.absolute()
        return dataclasses.replace(self, folder=self.folder.absolute(), file=file)


def find_output(name: str, source: Source) -> Output:
    """A path that ends in .jsonl is a file, and any other a folder.

    Raises:
      InputError: it cannot be written there, or would write over the input.
    """
    path = Path(name)
    if path.suffix.lower() in OTHER_FILES:
        raise InputError(f"{path}: expected a folder or a .jsonl file as output")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    if path.suffix.lower() == ".jsonl":
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a file that could be replaced")
        output = Output(name, path.with_name(path.name + SHARDS_SUFFIX), path)
    else:
        output = Output(name, path, None)
    if output.folder.exists() and not output.folder.is_dir():
        raise InputError(f"{output.folder}: is a file, where a folder is to be written")
    _check_apart(output, source)
    return output


def _check_apart(output: Output, source: Source) -> None:
    for file in source.files:
        if output.file is not None and output.file.exists() and output.file.samefile(file.path):
            raise InputError(f"{output.file}: input and output are the same file")
        inside = output.folder.resolve() in file.path.resolve().parents
        if inside and not file.path.name.startswith(SPOOL):
            raise InputError(f"{file.shown}: lies in the folder of the output")
    for path in (output.file, output.folder):
        for folder in source.folders:
            if path is not None and folder.resolve() in (path.resolve(), *path.resolve().parents):
                raise InputError(f"{path}: lies in the folder {folder}, which is the input")
