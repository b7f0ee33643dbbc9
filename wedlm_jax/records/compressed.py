"""Unpacks compressed files of records while they are read.

Tested by tests/infer/job/test_input.py.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from wedlm_jax.errors import InputError, require_extra

GZIP, ZSTD = ".gz", ".zst"
BLOCK = 2**20

DAMAGE = (EOFError, zlib.error, OSError)
"""What unpacking a damaged file raises; its `OSError` has no ``errno``."""


def is_compressed(path: Path) -> bool:
    """Returns whether a file has an ending that `unpacked` unpacks."""
    return path.suffix.lower() in (GZIP, ZSTD)


def unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    """Returns a stream that unpacks a file while it is read; ``raw`` if it is not compressed.

    Args:
      raw: the file, open.
      path: path of the file, whose ending says how it is compressed.

    Raises:
      InputError: pyarrow, which unpacks zstd, is not installed.
    """
    ending = path.suffix.lower()
    if ending == GZIP:
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if ending != ZSTD:
        return raw
    require_extra(f"{path}: zstd", "data", "pyarrow")
    import pyarrow

    stream = _Raw(pyarrow.CompressedInputStream(raw, "zstd"))
    return cast(IO[bytes], io.BufferedReader(stream, BLOCK))


@contextlib.contextmanager
def naming_damage(shown: str) -> Iterator[None]:
    """Turns the errors from unpacking a truncated or damaged file into an `InputError`."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{shown}: the compressed data is damaged ({error})") from None


def skip(stream: IO[bytes], size: int) -> None:
    """Skips bytes by reading them: compressed data must be unpacked to reach a position in it."""
    while size > 0 and (block := stream.read(min(size, BLOCK))):
        size -= len(block)


class _Raw(io.RawIOBase):
    """Reads from a pyarrow stream, which has no lines."""

    def __init__(self, stream: Any):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
