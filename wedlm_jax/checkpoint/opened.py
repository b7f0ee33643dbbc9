"""Opens a checkpoint folder of either format as the Hugging Face tensors that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from wedlm_jax.checkpoint.hf_folder import INDEX, WEIGHTS, HFCheckpoint
from wedlm_jax.checkpoint.model_folder import (
    ORBAX,
    OrbaxCheckpoint,
    StoredParameters,
    check_arrays,
)
from wedlm_jax.checkpoint.names import Entry
from wedlm_jax.config import ModelConfig
from wedlm_jax.host.storage import as_path


class StoredTensors(Protocol):
    """Tensors by their Hugging Face names; see `wedlm_jax.checkpoint.safetensors_file`."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read_rows(self, name: str, rows: slice = ...) -> Iterator[tuple[int, np.ndarray]]: ...


class OpenedCheckpoint(Protocol):
    """Holds what loading a model needs of a checkpoint."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensors]: ...

    def dtypes(self) -> set[str]: ...


def open_checkpoint(folder: str | Path) -> OpenedCheckpoint:
    """Opens a Hugging Face folder, or an orbax one that `wedlm convert` has made; only headers are
    read.

    Raises:
      InputError: naming what is missing, cut off or not what it should be.
    """
    folder = as_path(folder)
    is_hf = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    if (folder / ORBAX).is_dir() and not is_hf:
        return OrbaxTensors(OrbaxCheckpoint(folder))
    return HFCheckpoint(folder)


class OrbaxTensors:
    """The parameters of an orbax checkpoint, or of a run's state, as Hugging Face's tensors.

    A parameter of all layers is read when the first of its tensors is asked for, and kept in the
    host's memory until another is; so they should be asked for in the order of the table.

    Attributes:
      folder, config: of the checkpoint.
      tensors: by name; all are in this object.

    Raises:
      InputError: naming the first missing, extra or misshapen parameter.
    """

    def __init__(self, checkpoint: StoredParameters):
        self._checkpoint = checkpoint
        self.folder, self.config = checkpoint.array_folder, checkpoint.config
        self._places: dict[str, tuple[Entry, int]] = {
            name: (entry, layer)
            for entry in check_arrays(checkpoint)
            for layer, name in enumerate(entry.hf_names)
        }
        self.tensors: dict[str, StoredTensors] = dict.fromkeys(self._places, self)
        self._newest: tuple[str, np.ndarray] | None = None

    def dtypes(self) -> set[str]:
        return {dtype for _, dtype in self._checkpoint.arrays.values()}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][0].hf_shape

    def dtype(self, name: str) -> str:
        return self._checkpoint.arrays[self._places[name][0].path][1]

    def read(self, name: str) -> np.ndarray:
        """Returns the values of a tensor, in the dtype of the file."""
        entry, layer = self._places[name]
        if self._newest is None or self._newest[0] != entry.path:
            self._newest = None  # let go before the next is read
            self._newest = (entry.path, self._checkpoint.read(entry.path))
        values = self._newest[1][layer] if entry.stacked else self._newest[1]
        return values.T if entry.transposed else values

    def read_rows(self, name: str, rows: slice = slice(None)) -> Iterator[tuple[int, np.ndarray]]:
        """Yields all the rows at once, as `SafetensorsFile.read_rows` yields a few."""
        values = self.read(name)
        matrix = values.reshape(len(values), -1)
        yield rows.indices(len(matrix))[0], matrix[rows]
