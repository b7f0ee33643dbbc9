"""Writes records as a Parquet file, one row group at a time; infers the types of its columns from
the records' values.

Tested by tests/infer/job/test_result_record.py.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from wedlm_jax.errors import InputError
from wedlm_jax.records.parquet import column_types, require_pyarrow

LARGEST = 2**63
GROUP_ROWS = 10_000
MOST_COLUMNS = 1000
"""The maximum number of columns from users' keys; more keys than this are themselves data."""


class Mixed(Exception):
    """A value that no column can have, or none together with others; the message says why."""


class Columns:
    """Infers the types of columns: integers and other numbers together are numbers, objects get the
    keys of all objects, and a null fits every type.

    Raises:
      InputError: pyarrow is not installed.
    """

    def __init__(self) -> None:
        require_pyarrow()
        self.types: dict[str, Any] = {}

    def add(self, fields: Mapping[str, Any], where: str) -> None:
        """Adds the values of a record, as parsed from JSON; messages call it ``where``.

        Raises:
          InputError: a value's type does not fit that of earlier ones, or no column can have it.
        """
        for name, value in fields.items():
            self._take(where, name, type_of, value)

    def add_file(self, path: Path, shown: str, names: Iterable[str]) -> None:
        """Adds columns of a Parquet file, with the types that their values have in JSON.

        Raises:
          InputError: a type does not fit that of an earlier file.
        """
        types = column_types(path, shown)
        for name in names:
            self._take(shown, name, _as_json, types[name])

    def _take(self, where: str, name: str, type_from: Callable[[Any], Any], given: Any) -> None:
        try:
            kind, before = type_from(given), self.types.get(name)
            if before is None and len(self.types) >= MOST_COLUMNS:
                raise Mixed(f"is one of more than {MOST_COLUMNS:,} keys, too many for columns")
            self.types[name] = kind if before is None else merged(before, kind)
        except Mixed as error:
            raise InputError(f"{where}: {name!r} {error}; use a .jsonl file as --output") from None


def type_of(value: Any) -> Any:
    """Returns the Arrow type of a JSON value.

    Raises:
      Mixed: a list mixes types that no column can have together, or an integer is too large.
    """
    import pyarrow as pa

    if value is None:
        return pa.null()
    if isinstance(value, str):
        return pa.string()
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        if not -LARGEST <= value < LARGEST:
            raise Mixed("is an integer of more than 64 bits")
        return pa.int64()
    if isinstance(value, float):
        return pa.float64()
    if isinstance(value, Mapping):
        return pa.struct([(name, type_of(one)) for name, one in value.items()])
    inner = pa.null()
    for one in value:
        inner = merged(inner, type_of(one))
    return pa.list_(inner)


def merged(one: Any, other: Any) -> Any:
    """Returns the type of a column that has values of both types.

    Raises:
      Mixed: there is none.
    """
    import pyarrow as pa

    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(merged(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            kind = fields.get(field.name, pa.null())
            fields[field.name] = merged(kind, field.type)
        return pa.struct(list(fields.items()))
    raise Mixed(f"is {_named(other)} here and {_named(one)} before, and a column has one type")


def _named(kind: Any) -> str:
    import pyarrow as pa

    if pa.types.is_list(kind):
        return "a list"
    if pa.types.is_struct(kind):
        return "an object"
    if pa.types.is_integer(kind):
        return "an integer"
    return {pa.bool_(): "true or false", pa.float64(): "a number"}.get(kind, "a text")


def _as_json(kind: Any) -> Any:
    """Returns the type that a Parquet column's values have in JSON: values without a JSON form,
    such as times, become text."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind) or pa.types.is_boolean(kind):
        return kind
    if pa.types.is_integer(kind):
        return kind if kind == pa.uint64() else pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_json(field.type)) for field in kind])
    if pa.types.is_map(kind):  # comes as a list of pairs
        return pa.list_(pa.list_(merged(_as_json(kind.key_type), _as_json(kind.item_type))))
    if hasattr(kind, "value_type"):
        return pa.list_(_as_json(kind.value_type))
    return pa.string()


def fitted(value: Any, kind: Any) -> Any:
    """Returns a JSON value in the form for a column of type ``kind``: objects have all keys, and
    what Parquet cannot hold, such as an object without keys, is None."""
    import pyarrow as pa

    if value is None or pa.types.is_null(kind):
        return None
    if pa.types.is_float64(kind):
        return float(value)
    if pa.types.is_list(kind):
        return [fitted(one, kind.value_type) for one in value]
    if pa.types.is_struct(kind):
        return {field.name: fitted(value.get(field.name), field.type) for field in kind}
    return value


def storable(kind: Any) -> Any:
    """Returns a type from `type_of` in a form that Parquet can store: with nulls in place of
    objects without keys."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.list_(storable(kind.value_type))
    if pa.types.is_struct(kind):
        fields = [(field.name, storable(field.type)) for field in kind]
        return pa.struct(fields) if fields else pa.null()
    return kind


Sink: TypeAlias = IO[bytes] | io.RawIOBase


def write_rows(
    sink: Sink, groups: Iterable[list[dict[str, Any]]], types: Mapping[str, Any]
) -> None:
    """Writes a Parquet file, compressed with zstd.

    Args:
      sink: receives its bytes, in order.
      groups: rows of each row group; missing fields become null.
      types: types of the columns, in order, from `storable`.
    """
    import pyarrow as pa

    schema = pa.schema(list(types.items()))
    with (
        contextlib.closing(pa.PythonFile(sink, mode="w")) as file,
        require_pyarrow().ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for rows in groups:
            columns = [
                pa.array([fitted(row.get(name), kind) for row in rows], kind)
                for name, kind in types.items()
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
