"""What kind of checkpoint a folder holds, and the orbax kind opened.

A Hugging Face folder holds ``config.json`` and safetensors files. An orbax folder holds the
same ``config.json`` and, in ``orbax/``, one checkpoint of the parameters as this project
names and stacks them (`wedlm_jax.checkpoint.names.PARAMETER_TABLE`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wedlm_jax.checkpoint.hf_folder import INDEX, WEIGHTS, model_config
from wedlm_jax.checkpoint.packaged import what_is_absent
from wedlm_jax.config import read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.host.storage import absolute, as_path, is_remote

if TYPE_CHECKING:
    import numpy as np

    from wedlm_jax.checkpoint.names import Entry
    from wedlm_jax.config import ModelConfig

ORBAX = "orbax"
RUN_STATES = "checkpoints"
RUN_MODEL = "model"
RUN_BASE = "base"
"""The parameters that a run with adapters does not train, a Hugging Face folder."""
FORMATS = ("hf", "orbax")
GGUF_SUFFIX = ".gguf"


def format_of(folder: Path) -> str:
    """Tells whether a checkpoint folder is "hf" or "orbax".

    Raises:
      InputError: there is no such folder, or it is neither or both.
    """
    if not folder.is_dir():
        if folder.exists():
            raise InputError(f"{folder}: {what_file(folder)}")
        is_file = folder.suffix == GGUF_SUFFIX
        raise InputError(f"{folder}: {'no such file' if is_file else what_is_absent(folder)}")
    is_hf = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    is_orbax = (folder / ORBAX).is_dir()
    if is_hf and is_orbax:
        raise InputError(f"{folder}: holds both safetensors and {ORBAX}/; expected one of them")
    if is_hf or is_orbax:
        return "orbax" if is_orbax else "hf"
    if not is_remote(folder) and (files := sorted(folder.glob(f"*{GGUF_SUFFIX}"))):
        raise InputError(f"{files[0]}: {what_file(files[0])}")
    patterns = ("", "*/", "checkpoints/*/")
    if any(any(folder.glob(f"{pattern}_CHECKPOINT_METADATA")) for pattern in patterns):
        raise InputError(
            f"{folder}: the state of a training run, not a model; a run that has ended has its "
            "model in hf/, and `wedlm convert RUN DIR` writes that of its newest state any time, "
            "with --config MODEL if the run has no model/ folder"
        )
    named = "a folder, not a GGUF file; " if folder.suffix == GGUF_SUFFIX else ""
    raise InputError(
        f"{folder}: {named}neither a Hugging Face checkpoint ({WEIGHTS} or {INDEX}) nor an orbax "
        f"one ({ORBAX}/)"
    )


def is_gguf(path: Path) -> bool:
    """Tells by its name or its first bytes whether a file is one of llama.cpp's."""
    if path.suffix == GGUF_SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def what_file(path: Path) -> str:
    """Returns what is wrong with a file that is given where a model's folder is expected."""
    if is_gguf(path):
        return f"is a GGUF file; `wedlm convert {path} DIR` makes a model's folder of it"
    return (
        "is a file; a model is a folder in Hugging Face format, with config.json and safetensors "
        "files"
    )


def run_model_folder(folder: Path) -> Path | None:
    """Returns the folder in which a training run keeps its model's ``config.json`` and tokenizer.

    Args:
      folder: the run's, its ``checkpoints``, or one state in there.

    Returns:
      None where there is no such folder: it is no run, or one of an earlier version.
    """
    folder = absolute(folder)
    if folder.name == RUN_STATES:
        run = folder.parent
    elif folder.parent.name == RUN_STATES:
        run = folder.parent.parent
    else:
        run = folder
    described = run / RUN_MODEL
    is_run = (run / RUN_STATES).is_dir() and (described / "config.json").exists()
    return described if is_run else None


class OrbaxCheckpoint:
    """An opened orbax folder.

    Attributes:
      folder: where it is.
      raw_config: ``config.json`` as it stands.
      array_folder: where orbax keeps the parameters.
      arrays: shape and dtype name of each parameter, by dotted path.
      config: the architecture.

    Raises:
      InputError: a file is missing, cut off or not what it should be.
    """

    def __init__(self, folder: str | Path):
        from wedlm_jax.checkpoint.orbax_io import array_shapes

        self.folder = as_path(folder)
        self.raw_config = read_config_json(self.folder)
        self.array_folder = self.folder / ORBAX
        self.arrays = array_shapes(self.array_folder)
        self.config = model_config(self.folder, self.raw_config, self._hf_names())

    def _hf_names(self) -> set[str]:
        from wedlm_jax.checkpoint.names import PARAMETER_TABLE

        return {name.format(0) for path, name, _, _ in PARAMETER_TABLE if path in self.arrays}

    def read(self, path: str) -> np.ndarray:
        """Reads one parameter into host memory."""
        from wedlm_jax.checkpoint.orbax_io import read_arrays

        return read_arrays(self.array_folder, [path])[path]


class StoredParameters(Protocol):
    """A model's parameters in orbax's files, wherever they stand; see `OrbaxCheckpoint`."""

    config: ModelConfig
    array_folder: Path
    arrays: dict[str, tuple[tuple[int, ...], str]]
    raw_config: dict[str, Any]

    def read(self, path: str) -> np.ndarray: ...


def check_arrays(checkpoint: StoredParameters) -> list[Entry]:
    """Verifies that the parameters are exactly the model's; returns the table.

    Raises:
      InputError: naming the first missing, extra or misshapen parameter.
    """
    from wedlm_jax.checkpoint.names import parameter_entries

    entries, folder = parameter_entries(checkpoint.config), checkpoint.array_folder
    expected = {entry.path: entry.shape for entry in entries}
    for path in sorted(set(expected) - set(checkpoint.arrays)):
        raise InputError(f"{folder}: parameter {path!r} is missing")
    for path in sorted(set(checkpoint.arrays) - set(expected)):
        raise InputError(f"{folder}: parameter {path!r} is not part of this model")
    for path, shape in expected.items():
        found = checkpoint.arrays[path][0]
        if found != shape:
            raise InputError(
                f"{folder}: parameter {path!r} has shape {list(found)}, expected {list(shape)}"
            )
    return entries
