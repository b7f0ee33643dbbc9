"""Reads JSON Lines: lines with their positions, and the object in each."""

from __future__ import annotations

import codecs
import collections
import json
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, NoReturn, Protocol

from wedlm_jax.errors import InputError, shortened

LARGEST_LINE = 32 * 2**20
"""The maximum bytes of a line; a longer one is a bad record, of which nothing is kept."""

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a character, which JSON can spell but no file can hold."""


class BadRecord(InputError):
    """A record that cannot be read.

    Attributes:
      reason: one of a few reasons, to count by.
      detail: the details of this record.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason} ({detail})")
        self.reason, self.detail = reason, detail


class Line(NamedTuple):
    """A line of a file.

    Attributes:
      at: the byte at which it begins.
      number: from 1.
      content: its bytes; None where it is longer than `LARGEST_LINE`.
    """

    at: int
    number: int
    content: bytes | None


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def read_lines(
    stream: IO[bytes], at: int = 0, number: int = 1, digest: Digest | None = None
) -> Iterator[Line]:
    """Yields the lines of a stream, except those of white space only.

    Args:
      at, number: position and number of the first line, at which the stream already is.
      digest: updated with all bytes that are read.
    """
    while True:
        content, size = _bounded_line(stream, digest)
        if not size:
            return
        if number == 1 and content is not None:
            content = content.removeprefix(codecs.BOM_UTF8)
        if content is None or (content and not content.isspace()):
            yield Line(at, number, content)
        at, number = at + size, number + 1


def parse_object(line: bytes | None) -> dict[str, Any]:
    """Parses a line that holds a JSON object; None is a line that is too long.

    Raises:
      BadRecord: it is not UTF-8, not JSON, not an object, or an object with a duplicate key.
    """
    if line is None:
        raise BadRecord("too long", f"more than {LARGEST_LINE // 2**20} MiB in a line")
    text = _decoded(line).strip()
    try:
        value = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except BadRecord:
        raise
    except UnicodeEncodeError:
        raise BadRecord("not UTF-8", "half of a surrogate pair, \\ud800 to \\udfff") from None
    except json.JSONDecodeError as error:
        # Its messages on strings and control characters already end in "at".
        what = error.msg.removesuffix(" at")
        raise BadRecord("not JSON", f"{what} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        # Numbers with thousands of digits, and brackets that are nested too deeply.
        raise BadRecord("not JSON", shortened(str(error))) from None
    if not isinstance(value, dict):
        raise BadRecord("not a JSON object", shortened(text, 60))
    return value


def _bounded_line(stream: IO[bytes], digest: Digest | None) -> tuple[bytes | None, int]:
    """Returns the next line and its size in bytes, 0 at the end; skips a line that is too long and
    returns None for it."""
    content = stream.readline(LARGEST_LINE + 1)
    if digest is not None:
        digest.update(content)
    size = len(content)
    if size <= LARGEST_LINE:
        return content, size
    while content and not content.endswith(b"\n"):
        content = stream.readline(LARGEST_LINE)
        size += len(content)
        if digest is not None:
            digest.update(content)
    return None, size


def _decoded(line: bytes) -> str:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line:
        raise BadRecord("not UTF-8", "UTF-16 or binary data")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord("not UTF-8", f"byte {error.start}; another encoding or binary") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        [(twice, _)] = counts.most_common(1)
        raise BadRecord("not JSON", f"duplicate key {shortened(twice, 60)!r}")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise BadRecord("not JSON", f"{name} is not a JSON number")
