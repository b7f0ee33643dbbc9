"""One safetensors file, with errors that name what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from wedlm_jax.errors import InputError

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class SafetensorsFile:
    """A memory-mapped file: names, shapes and dtypes at once, values when read.

    Raises:
      InputError: naming the file, and the tensor where it is one that cannot be used.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.exists():
            raise InputError(f"{path}: no such file, though the checkpoint names it")
        try:
            self._file = safe_open(str(path), framework="numpy")
        except (SafetensorError, OSError) as error:
            if _is_lfs_pointer(path):
                raise InputError(
                    f"{path}: a Git LFS pointer, not the file itself; `git lfs pull` fetches it"
                ) from None
            raise InputError(f"{path}: truncated or not a safetensors file ({error})") from None
        self._slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        for name, header in self._slices.items():
            if header.get_dtype() not in DTYPES:
                raise InputError(
                    f"{path}: tensor {name!r} has dtype {header.get_dtype()}, "
                    f"expected one of {', '.join(DTYPES)}"
                )

    def names(self) -> list[str]:
        return list(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> str:
        """The dtype's NumPy name: "float32", "float16" or "bfloat16"."""
        return np.dtype(DTYPES[self._slices[name].get_dtype()]).name

    def read(self, name: str) -> np.ndarray:
        return self._file.get_tensor(name)


def _is_lfs_pointer(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(30).startswith(b"version https://git-lfs")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes ``tensors`` to ``path`` and waits until they are on disk."""
    save_file(tensors, str(path), metadata={"format": "pt"})
    # The library makes a file that only its owner may read; let whoever may read the folder.
    path.chmod(path.parent.stat().st_mode & 0o666)
    with path.open("rb") as file:
        os.fsync(file.fileno())
