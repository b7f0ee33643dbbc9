"""Reads rows of Parquet files, a few at a time. pyarrow is an optional dependency."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from wedlm_jax.errors import InputError, require_extra, shortened

ROWS_AT_A_TIME = 256
READ_BUFFER = 2**20


class NotParquet(InputError):
    """A file that pyarrow cannot read, wholly or in part.

    Attributes:
      detail: pyarrow's message.
    """

    def __init__(self, shown: str, detail: str):
        super().__init__(f"{shown}: cannot be read as Parquet ({detail})")
        self.detail = detail


def require_pyarrow() -> Any:
    """Returns the module `pyarrow.parquet`.

    Raises:
      InputError: it is not installed.
    """
    require_extra("Parquet", "data", "pyarrow")
    import pyarrow.parquet

    return pyarrow.parquet


def column_names(path: Path, shown: str) -> list[str]:
    """Returns the names of a file's columns; raises as `read_rows` does."""
    return list(column_types(path, shown))


def column_types(path: Path, shown: str) -> dict[str, Any]:
    """Returns the Arrow types of a file's columns by their names; raises as `read_rows` does."""
    with _opened(path, shown) as file:
        return {field.name: field.type for field in file.schema_arrow}


def rows_of_groups(path: Path, shown: str) -> list[int]:
    """Returns how many rows each row group has; raises as `read_rows` does."""
    with _opened(path, shown) as file:
        return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]


def read_rows(
    path: Path,
    shown: str,
    columns: Collection[str] | None = None,
    start: int = 0,
    count: int | None = None,
    optional: Collection[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields rows without their nulls: in a table every row has all columns, and every struct all
    fields, so a null cannot be distinguished from a missing value.

    Args:
      path: path of the file.
      shown: its name in messages.
      columns: columns to read, if the file has them; None for all.
      start: number of the first row, from 0.
      count: number of rows; None for all from there on.
      optional: columns whose nulls are left out; others keep them. None for all.

    Raises:
      NotParquet: the file is damaged.
      InputError: pyarrow is not installed.
    """
    with _opened(path, shown) as file:
        names = [n for n in file.schema_arrow.names if columns is None or n in columns]
        total = file.metadata.num_rows
        stop = total if count is None else min(start + count, total)
        first = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if first < stop and first + size > start:
                kept = [] if optional is None else [n for n in names if n not in optional]
                for row in _rows_of_group(file, group, names, start - first, stop - first):
                    yield without_nulls(row) | {name: row[name] for name in kept}
            first += size


def _rows_of_group(
    file: Any, group: int, names: list[str], start: int, stop: int
) -> Iterator[dict[str, Any]]:
    here = 0
    for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=[group], columns=names):
        yield from batch.slice(max(start - here, 0), max(stop - max(here, start), 0)).to_pylist()
        here += batch.num_rows
        if here >= stop:
            return


@contextlib.contextmanager
def _opened(path: Path, shown: str) -> Iterator[Any]:
    try:
        # With a buffer, a row group's column is read a little at a time.
        with require_pyarrow().ParquetFile(path, buffer_size=READ_BUFFER) as file:
            yield file
    except InputError:
        raise
    except Exception as error:
        # pyarrow has its own error types for everything that may be damaged.
        raise NotParquet(shown, shortened(str(error))) from None


def without_nulls(struct: dict[str, Any]) -> dict[str, Any]:
    """Returns a struct without its nulls and without inner structs that hold nothing else."""
    kept = {}
    for key, value in struct.items():
        if isinstance(value, dict):
            value = without_nulls(value) or None
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            value = [without_nulls(item) if isinstance(item, dict) else item for item in value]
        if value is not None:
            kept[key] = value
    return kept
