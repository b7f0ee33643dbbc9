"""Reads and writes safetensors files in parts, with errors that name what is wrong.

Nothing is memory-mapped: data passes through small buffers, so that a process that handles a large
file does not grow by the file's pages.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import sync
from wedlm_jax.host.storage import READ_BYTES, ByteRanges, is_remote, open_new

DTYPES = ("float32", "bfloat16", "float16")
STORED = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
CODES = {np.dtype(dtype): code for code, dtype in STORED.items()}

BUFFER_BYTES = 2 * 1024**2
"""Approximate size of a read or write: it fits a core's cache, where casting is cheap."""


def numpy_dtype(name: str | None) -> np.dtype | None:
    """Returns the dtype called "float32", "bfloat16" or "float16"; None for None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, not {name!r}")
    return np.dtype(getattr(ml_dtypes, name, name))


Rows = Iterator[tuple[int, np.ndarray]]
"""Some rows at a time, in order: the number of the first row, and values ``[some rows, C]``, which
are valid only until the next are requested."""


@dataclasses.dataclass(frozen=True)
class DeferredArray:
    """A tensor or a parameter whose values are read when they are needed.

    Attributes:
      name: its name in the checkpoint, or a parameter's dotted path.
      shape: its shape.
      dtype: dtype of the values, or the one to which they are cast when written.
      read: returns the values. If they are spread over several hosts, all of them must call it.
      rows: reads a range of rows in parts; see `read_rows`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    rows: Callable[[slice], Rows] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def read_rows(self, rows: slice = slice(None)) -> Rows:
        """Reads rows of a matrix ``[R, C]``; a vector is ``[R, 1]``. All rows come at once if they
        cannot be read in parts."""
        if self.rows is not None:
            yield from self.rows(rows)
        else:
            values = self.read()
            matrix = values.reshape(len(values), -1)
            yield rows.indices(len(matrix))[0], matrix[rows]


def array_in_rows(
    name: str, shape: tuple[int, ...], dtype: np.dtype, rows: Callable[[slice], Rows]
) -> DeferredArray:
    """Returns an array whose values are assembled from its rows."""

    def read() -> np.ndarray:
        values = np.empty(shape, dtype)
        for start, part in rows(slice(None)):
            bits(values.reshape(-1, part.shape[1]))[start : start + len(part)] = bits(part)
        return values

    return DeferredArray(name, shape, dtype, read, rows)


def cast(name: str, tensor: np.ndarray, dtype: Any) -> np.ndarray:
    """Converts ``tensor`` to ``dtype``.

    Raises:
      InputError: it holds finite values that ``dtype`` cannot represent (float16 ends at 65504).
    """
    if dtype is None or tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        result = tensor.astype(dtype)
    if np.dtype(dtype).name != "float32" and np.any(np.isinf(result) & np.isfinite(tensor)):
        raise InputError(
            f"tensor {name!r} holds values too large for {np.dtype(dtype).name}; use bfloat16"
        )
    return result


def bits(array: np.ndarray) -> np.ndarray:
    """Views the same memory as unsigned integers, which NumPy moves several times faster than
    dtypes from other packages."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


UNSOUND = (SafetensorError, OSError, EOFError, ValueError, KeyError, TypeError)


class SafetensorsFile:
    """An open file with ``tensors`` by name.

    Raises:
      InputError: the file cannot be used; the message names it and the tensor at fault.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.exists():
            raise InputError(f"{path}: no such file, although other files of its folder need it")
        try:
            self._bytes = ByteRanges(path)
            self._data, header = _sound_header(path, self._bytes)
        except UNSOUND as error:
            if _is_lfs_pointer(path):
                raise InputError(
                    f"{path}: a Git LFS pointer, not the file itself; `git lfs pull` fetches it"
                ) from None
            raise InputError(f"{path}: truncated or not a safetensors file ({error})") from None
        for name, entry in header.items():
            if entry["dtype"] not in STORED:
                raise InputError(
                    f"{path}: tensor {name!r} has dtype {entry['dtype']}, "
                    f"expected one of {', '.join(STORED)}"
                )
        self.tensors = {name: self._tensor(name, entry) for name, entry in header.items()}

    def _tensor(self, name: str, entry: dict[str, Any]) -> DeferredArray:
        shape, dtype = tuple(entry["shape"]), np.dtype(STORED[entry["dtype"]])
        rows = partial(self._rows, shape, dtype, self._data + entry["data_offsets"][0])
        return array_in_rows(name, shape, dtype, rows)

    def _rows(self, shape: tuple[int, ...], dtype: np.dtype, offset: int, rows: slice) -> Rows:
        """Reads rows, as many at a time as fit a buffer.

        Rows are read whole even if few of their columns are needed: a few large reads are faster
        than a small read per row.
        """
        width = math.prod(shape[1:])
        first, end, _ = rows.indices(shape[0] if shape else 1)
        most = READ_BYTES if is_remote(self.path) else BUFFER_BYTES
        at_once = max(1, most // max(1, width * dtype.itemsize))
        buffer = np.empty((min(at_once, max(0, end - first)), width), dtype)
        for start in range(first, end, at_once):
            part = buffer[: min(at_once, end - start)]
            self._fill(part, offset + start * width * dtype.itemsize)
            yield start, part

    def _fill(self, values: np.ndarray, offset: int) -> None:
        try:
            _fill(self._bytes, values.reshape(-1).view(np.uint8).data, offset)
        except EOFError:
            raise InputError(f"{self.path}: truncated while it was being read") from None


def _sound_header(path: Path, file: ByteRanges) -> tuple[int, dict[str, dict]]:
    """Returns the offset of the first value, and the tensors' entries. If the header is not sound,
    or describes more than the file holds, this raises any of `UNSOUND`."""
    if not is_remote(path):
        with safe_open(str(path), framework="numpy"):
            pass  # the library checks that the header is sound and covers the file
    length = int.from_bytes(_header_bytes(file, 0, 8), "little")
    if 8 + length > file.size:
        raise ValueError(f"a header of {length:,} bytes in a file of {file.size:,}")
    header = json.loads(_header_bytes(file, 8, length))
    header.pop("__metadata__", None)
    # The library would read all of a file in a bucket, so the essentials are checked here.
    end = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        end = max(end, stop)
        dtype = STORED.get(entry["dtype"])
        if dtype and stop - start != math.prod(entry["shape"]) * np.dtype(dtype).itemsize:
            raise ValueError(f"tensor {name!r}: stored size does not match its shape")
    if 8 + length + end != file.size:
        raise ValueError(f"the header does not cover a file of {file.size:,} bytes")
    return 8 + length, header


def _header_bytes(file: ByteRanges, offset: int, length: int) -> bytes:
    content = bytearray(length)
    _fill(file, memoryview(content), offset)
    return bytes(content)


def _fill(file: ByteRanges, view: memoryview, offset: int) -> None:
    """Reads bytes until ``view`` is full."""
    while view:
        count = file.read_into(view, offset)
        if count == 0:
            raise EOFError("it ends within the header")
        view, offset = view[count:], offset + count


def _is_lfs_pointer(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(30).startswith(b"version https://git-lfs")


def write_safetensors(
    path: Path, tensors: Sequence[DeferredArray], values: Iterable[np.ndarray]
) -> None:
    """Writes tensors to ``path`` one by one, and waits until they are on disk.

    Args:
      tensors: the tensors, in the file's order.
      values: the tensors' values in that order, read by the caller. They need not be contiguous,
        and are cast to each tensor's dtype, a few rows at a time.

    Raises:
      InputError: values do not fit their dtype.
    """
    with open_new(path) as file:
        text = json.dumps(_header(tensors), separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        source = iter(values)
        for tensor in tensors:
            _write_values(file, tensor, next(source))  # no name here keeps the value in memory
        if not is_remote(path):
            sync(file)
    if not is_remote(path):
        # Whoever may read the folder may read the file, whatever the process's umask is.
        path.chmod(path.parent.stat().st_mode & 0o666)


def _header(tensors: Sequence[DeferredArray]) -> dict[str, dict]:
    content: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        content[tensor.name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    return content


def _write_values(file: IO[bytes], tensor: DeferredArray, value: np.ndarray) -> None:
    assert value.shape == tensor.shape, f"{tensor.name}: {value.shape}, not {tensor.shape}"
    rows = value.reshape(1) if value.ndim == 0 else value
    at_once = max(1, BUFFER_BYTES * len(rows) // max(1, rows.nbytes))
    for start in range(0, len(rows), at_once):
        part = np.ascontiguousarray(bits(rows[start : start + at_once])).view(rows.dtype)
        file.write(bits(cast(tensor.name, part, tensor.dtype)).data)
