"""One safetensors file, read and written in parts, with errors that name what is wrong.

Nothing is memory-mapped: what is read or written passes through small buffers, so that a
process that handles a large file does not grow by the file's pages.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""About what one read or write moves: fits a core's cache, where transposing is cheap."""


def numpy_dtype(name: str | None) -> np.dtype | None:
    """Returns the dtype called "float32", "bfloat16" or "float16"; None for None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, not {name!r}")
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class DeferredArray:
    """A tensor or a parameter that is going to be written.

    Attributes:
      name: in the file.
      shape: in the file.
      dtype: of the file.
      read: returns the values; where they lie on several hosts, these do it together.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def cast(name: str, tensor: np.ndarray, dtype: Any) -> np.ndarray:
    """Converts ``tensor`` to ``dtype``.

    Raises:
      InputError: it holds finite values that this dtype cannot (float16 ends at 65504).
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
    """Views the same memory as unsigned integers: NumPy moves these several times faster than
    dtypes that are not its own."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


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
            self._bytes = ByteRanges(path)
            self._data, header = _sound_header(path, self._bytes)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            if _is_lfs_pointer(path):
                raise InputError(
                    f"{path}: a Git LFS pointer, not the file itself; `git lfs pull` fetches it"
                ) from None
            raise InputError(f"{path}: truncated or not a safetensors file ({error})") from None
        header.pop("__metadata__", None)
        self._header: dict[str, dict] = header
        for name, entry in header.items():
            if entry["dtype"] not in STORED:
                raise InputError(
                    f"{path}: tensor {name!r} has dtype {entry['dtype']}, "
                    f"expected one of {', '.join(STORED)}"
                )

    def names(self) -> list[str]:
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> str:
        """Returns the dtype's NumPy name: "float32", "float16" or "bfloat16"."""
        return np.dtype(STORED[self._header[name]["dtype"]]).name

    def read(self, name: str) -> np.ndarray:
        """Reads all values of a tensor."""
        shape = self.shape(name)
        values = np.empty(shape, self.dtype(name))
        for start, part in self.read_rows(name):
            bits(values.reshape(-1, part.shape[1]))[start : start + len(part)] = bits(part)
        return values

    def read_rows(self, name: str, rows: slice = slice(None)) -> Iterator[tuple[int, np.ndarray]]:
        """Reads rows of a tensor, whole and in order, as many at a time as fit a buffer.

        Rows are always read whole, even where few of their columns are wanted: a few large reads
        of all of it take less time than a read of some bytes for every row.

        Args:
          name: of a tensor, taken as a matrix ``[R, C]``; of a vector C is 1.
          rows: those wanted.

        Yields:
          the number of the first row and values ``[some rows, C]``, in the file's dtype; they are
          gone when the next are asked for.
        """
        shape, dtype = self.shape(name), np.dtype(self.dtype(name))
        width = math.prod(shape[1:])
        first, end, _ = rows.indices(shape[0] if shape else 1)
        most = READ_BYTES if is_remote(self.path) else BUFFER_BYTES
        at_once = max(1, most // max(1, width * dtype.itemsize))
        buffer = np.empty((min(at_once, max(0, end - first)), width), dtype)
        base = self._data + self._header[name]["data_offsets"][0]
        for start in range(first, end, at_once):
            part = buffer[: min(at_once, end - start)]
            self._fill(part, base + start * width * dtype.itemsize)
            yield start, part

    def _fill(self, values: np.ndarray, offset: int) -> None:
        view = values.reshape(-1).view(np.uint8).data
        while view:
            count = self._bytes.read_into(view, offset)
            if count == 0:
                raise InputError(f"{self.path}: truncated while it was being read")
            view, offset = view[count:], offset + count


def _sound_header(path: Path, file: ByteRanges) -> tuple[int, dict[str, dict]]:
    """Checks the header; returns the offset at which values begin, and the header.

    Raises:
      ValueError, KeyError, TypeError, SafetensorError: the header is not sound, or says more than
        the file holds.
    """
    if not is_remote(path):
        with safe_open(str(path), framework="numpy"):
            pass  # the library checks that the header is sound and covers the file
    first = _read(file, 0, 8)
    length = int.from_bytes(first, "little")
    if 8 + length > file.size:
        raise ValueError(f"a header of {length:,} bytes in a file of {file.size:,}")
    header = json.loads(_read(file, 8, length))
    # Of a file in a bucket the library would have to read all, so this much is checked here.
    ends = {name: x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in STORED:
            continue
        start, end = entry["data_offsets"]
        if end - start != math.prod(entry["shape"]) * np.dtype(STORED[entry["dtype"]]).itemsize:
            raise ValueError(f"tensor {name!r} has not the bytes of its shape")
    if 8 + length + max(ends.values(), default=0) != file.size:
        raise ValueError(f"the header does not cover a file of {file.size:,} bytes")
    return 8 + length, header


def _read(file: ByteRanges, offset: int, length: int) -> bytes:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        count = file.read_into(view, offset)
        if not count:
            raise ValueError("it ends within the header")
        view, offset = view[count:], offset + count
    return bytes(content)


def _is_lfs_pointer(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(30).startswith(b"version https://git-lfs")


def write_safetensors(
    path: Path, tensors: Sequence[DeferredArray], values: Iterable[np.ndarray]
) -> None:
    """Writes tensors to ``path``, each when it comes, and waits until they are on disk.

    Args:
      path: of the file.
      tensors: in the order of the file.
      values: theirs, in that order, read by the caller. They are cast to the tensor's dtype and
        need not be contiguous; both is done a few rows at a time.

    Raises:
      InputError: values do not fit their dtype.
    """
    with open_new(path) as file:
        text = json.dumps(_header(tensors), separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        source = iter(values)
        for tensor in tensors:
            _write_values(file, tensor, next(source))  # and kept by no name here
        if not is_remote(path):
            sync(file)
    if not is_remote(path):
        # Whoever may read the folder may read the file, whatever the process's mask says.
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
