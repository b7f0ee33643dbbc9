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
from typing import IO, cast

from wedlm_jax.errors import InputError, require_extra

GZIP, ZSTD = ".gz", ".zst"
BLOCK = 2**20

DAMAGE = (EOFError, zlib.error, OSError)
"""What unpacking a damaged file raises; its `OSError` has no ``errno``."""


def is_compressed(path: Path) -> bool:
    """Returns whether a file has an ending that `unpacked` unpacks."""
    return path.suffix.lower() in (GZIP, ZSTD)


def unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    """Returns a stream that unpacks an open file while it is read, going by the ending of its path;
    ``raw`` if it is not compressed.

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

    # Buffered, since a pyarrow stream has no lines.
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), BLOCK)


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
