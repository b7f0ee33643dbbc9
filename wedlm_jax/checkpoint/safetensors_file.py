"""One safetensors file, read and written in parts, with errors that name what is wrong.

Nothing is memory-mapped: what is read or written passes through small buffers, so that a
process that handles a large file does not grow by the file's pages.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from wedlm_jax.checkpoint.dtypes import bits, cast
from wedlm_jax.errors import InputError

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}

BUFFER_BYTES = 2 * 1024**2
"""About what one read or write moves: fits a core's cache, where transposing is cheap."""
GAP_BYTES = 4096
"""Columns that are not wanted are read along where a row has no more than this of them: a
disk reads whole pages anyway."""

Header = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of a tensor."""


class SafetensorsFile:
    """An opened file: names, shapes and dtypes at once, values when read.

    Raises:
      InputError: naming the file, and the tensor where it is one that cannot be used.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.exists():
            raise InputError(f"{path}: no such file, though the checkpoint names it")
        try:
            with safe_open(str(path), framework="numpy"):
                pass  # the library checks that the header is sound and covers the file
        except (SafetensorError, OSError) as error:
            if _is_lfs_pointer(path):
                raise InputError(
                    f"{path}: a Git LFS pointer, not the file itself; `git lfs pull` fetches it"
                ) from None
            raise InputError(f"{path}: truncated or not a safetensors file ({error})") from None
        # A handle of its own: what is read later is this file, whatever takes its name.
        self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
        self._data = 8 + length
        header = json.loads(os.pread(self._handle, length, 8))
        header.pop("__metadata__", None)
        self._header: dict[str, dict] = header
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise InputError(
                    f"{path}: tensor {name!r} has dtype {entry['dtype']}, "
                    f"expected one of {', '.join(DTYPES)}"
                )

    def names(self) -> list[str]:
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> str:
        """Returns the dtype's NumPy name: "float32", "float16" or "bfloat16"."""
        return np.dtype(DTYPES[self._header[name]["dtype"]]).name

    def read(self, name: str) -> np.ndarray:
        """Reads all values of a tensor."""
        shape = self.shape(name)
        values = np.empty(shape, self.dtype(name))
        for start, part in self.read_rows(name):
            bits(values.reshape(-1, part.shape[1]))[start : start + len(part)] = bits(part)
        return values

    def read_rows(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Reads some rows and columns of a tensor, a few rows at a time, and little else.

        Args:
          name: of a tensor, taken as a matrix ``[R, C]``; of a vector C is 1.
          rows: those wanted.
          columns: those wanted of each.

        Yields:
          the number of the first row and values ``[some rows, columns]``, in the file's dtype;
          they are gone when the next are asked for.
        """
        shape, dtype = self.shape(name), np.dtype(self.dtype(name))
        width = math.prod(shape[1:])
        first, end, _ = rows.indices(shape[0] if shape else 1)
        left, right, _ = columns.indices(width)
        if (width - (right - left)) * dtype.itemsize <= GAP_BYTES:
            read_left, read_right = 0, width
        else:
            read_left, read_right = left, right
        at_once = max(1, BUFFER_BYTES // max(1, (read_right - read_left) * dtype.itemsize))
        buffer = np.empty((min(at_once, max(0, end - first)), read_right - read_left), dtype)
        base = self._data + self._header[name]["data_offsets"][0]
        for start in range(first, end, at_once):
            part = buffer[: min(at_once, end - start)]
            # Whole rows lie together; of cut ones, each is read by itself.
            pieces = [part] if part.shape[1] == width else part
            for i, piece in enumerate(pieces):
                offset = (start + i) * width + read_left
                self._fill(piece, base + offset * dtype.itemsize)
            yield start, part[:, left - read_left : right - read_left]

    def _fill(self, values: np.ndarray, offset: int) -> None:
        view = values.reshape(-1).view(np.uint8).data
        while view:
            count = os.preadv(self._handle, [view], offset)
            if count == 0:
                raise InputError(f"{self.path}: truncated while it was being read")
            view, offset = view[count:], offset + count


def _is_lfs_pointer(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(30).startswith(b"version https://git-lfs")


def write_safetensors(
    path: Path, headers: Mapping[str, Header], values: Iterable[np.ndarray]
) -> None:
    """Writes tensors to ``path``, each when it comes, and waits until they are on disk.

    Args:
      path: of the file.
      headers: of the tensors, in the order of the file.
      values: theirs, in that order. They are cast to the header's dtype and need not be
        contiguous; both is done a few rows at a time.

    Raises:
      InputError: values do not fit their dtype.
    """
    with path.open("wb") as file:
        text = json.dumps(_header(headers), separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        source = iter(values)
        for name, header in headers.items():
            _write_values(file, name, next(source), header)  # and kept by no name here
        file.flush()
        os.fsync(file.fileno())
    # Whoever may read the folder may read the file, whatever the process's mask says.
    path.chmod(path.parent.stat().st_mode & 0o666)


def _header(headers: Mapping[str, Header]) -> dict[str, dict]:
    content: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in headers.items():
        end = offset + math.prod(shape) * dtype.itemsize
        content[name] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    return content


def _write_values(file: BinaryIO, name: str, value: np.ndarray, header: Header) -> None:
    shape, dtype = header
    assert value.shape == shape, f"{name}: {value.shape} where {shape} was announced"
    rows = value.reshape(1) if value.ndim == 0 else value
    at_once = max(1, BUFFER_BYTES * len(rows) // max(1, rows.nbytes))
    for start in range(0, len(rows), at_once):
        part = np.ascontiguousarray(bits(rows[start : start + at_once])).view(rows.dtype)
        file.write(bits(cast(name, part, dtype)).data)
