"""Rows of Parquet files, a few at a time: the one file here that knows pyarrow."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from infer.job.source import PARQUET, InputFile
from wedlm_jax.errors import InputError
from wedlm_jax.parquet import require_pyarrow

PROMPT_KINDS = ("prompt", "prompt_token_ids", "messages")
KEYS = (*PROMPT_KINDS, "id", "sampling")
"""Lists the keys that a row may have, in JSONL and in Parquet."""
ROWS_AT_A_TIME = 256
READ_BUFFER = 2**20


def parquet_rows(file: InputFile, start: int = 0) -> Iterator[dict[str, Any]]:
    """The rows from number ``start`` on: those columns that are a row's keys, without nulls.

    Raises:
      InputError: the file cannot be read.
    """
    with _opened(file) as parquet:
        for row in _columns(parquet, [name for name in _names(parquet) if name in KEYS], start):
            yield _as_fields(row)


def parquet_ids(file: InputFile) -> Iterator[dict[str, Any]]:
    """Each row with nothing but its ``id``, if it has one.

    Raises:
      InputError: the file cannot be read, or has no column with a prompt.
    """
    with _opened(file) as parquet:
        names = _names(parquet)
        if not set(names) & set(PROMPT_KINDS):
            raise InputError(
                f"{file.shown}: expected a column {', '.join(PROMPT_KINDS[:-1])} or "
                f"{PROMPT_KINDS[-1]}; there are {', '.join(names) or 'none'}"
            )
        if "id" not in names:
            for _ in range(parquet.metadata.num_rows):
                yield {}
            return
        for row in _columns(parquet, ["id"], 0):
            yield _as_fields(row)


def unread_columns(files: Sequence[InputFile]) -> list[str]:
    """Returns the columns of Parquet files that are no key of a row."""
    found: dict[str, None] = {}
    for file in files:
        if file.kind == PARQUET:
            with _opened(file) as parquet:
                found |= dict.fromkeys(name for name in _names(parquet) if name not in KEYS)
    return list(found)


@contextlib.contextmanager
def _opened(file: InputFile) -> Iterator[Any]:
    try:
        # Buffered, a column of a row group is read piece by piece.
        with require_pyarrow().ParquetFile(file.path, buffer_size=READ_BUFFER) as parquet:
            yield parquet
    except InputError:
        raise
    except Exception as error:
        # pyarrow has error types of its own, for all that may be damaged.
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file.shown}: cannot be read as Parquet ({reason})") from None


def _names(parquet: Any) -> list[str]:
    return list(parquet.schema_arrow.names)


def _columns(parquet: Any, names: list[str], start: int) -> Iterator[dict[str, Any]]:
    first = 0
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if first + rows > start:
            batches = parquet.iter_batches(
                batch_size=ROWS_AT_A_TIME, row_groups=[group], columns=names
            )
            here = first
            for batch in batches:
                skipped = min(max(start - here, 0), batch.num_rows)
                yield from batch.slice(skipped).to_pylist()
                here += batch.num_rows
        first += rows


def _as_fields(row: dict[str, Any]) -> dict[str, Any]:
    """A column that other rows fill is not a key of this one; so within ``sampling``, however
    deep: the objects there, too, are structs with the keys of all rows."""
    fields = {key: value for key, value in row.items() if value is not None}
    sampling = fields.get("sampling")
    if isinstance(sampling, dict):
        fields["sampling"] = _without_nulls(sampling)
    elif isinstance(sampling, str):
        # One column type does not suit every row's fields; a text of JSON does.
        with contextlib.suppress(ValueError, RecursionError):
            fields["sampling"] = json.loads(sampling)
    return fields


def _without_nulls(struct: dict[str, Any]) -> dict[str, Any]:
    """A struct without its nulls, nor structs in it that are nothing else: these cannot be told
    from a null."""
    kept = {}
    for key, value in struct.items():
        if isinstance(value, dict):
            value = _without_nulls(value) or None
        if value is not None:
            kept[key] = value
    return kept
