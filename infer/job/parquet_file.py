"""The results of a job as one Parquet file: columns of the same names as the keys in JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from infer.job.result_record import OUTPUT_KEYS
from wedlm_jax.completion import Drafts
from wedlm_jax.records.columns import GROUP_ROWS, Columns, Sink, storable, write_rows

GROUP_BYTES = 16 * 2**20
"""Bytes of results, as JSON, that make a row group of fewer than `GROUP_ROWS` rows: a group is in
memory as a whole."""


def write_results(sink: Sink, blocks: Iterable[bytes], columns: Columns) -> None:
    """Writes the results, which come as blocks of lines of JSON.

    The columns of results are there in every file, whether any record has a value or none has.

    Args:
      columns: the types of the ids and of the own keys.
    """
    types = {name: storable(kind) for name, kind in columns.types.items()}
    mine = {**_result_types(), **({"id": types["id"]} if "id" in types else {})}
    write_rows(sink, _groups(blocks), {**mine, **types})


def _result_types() -> dict[str, Any]:
    import pyarrow as pa

    pair = pa.struct([("token_id", pa.int32()), ("logprob", pa.float64())])
    token = pa.struct([("logprob", pa.float64()), ("top", pa.list_(pair))])
    sample = {
        "text": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "num_forwards": pa.int64(),
        "num_token_instances": pa.int64(),
        "drafts": pa.struct([(name, pa.int64()) for name in Drafts._fields]),
        "logprobs": pa.list_(token),
    }
    types = {
        "id": pa.int64(),
        **sample,
        "samples": pa.list_(pa.struct(list(sample.items()))),
        "error": pa.string(),
        "line": pa.int64(),
        "file": pa.string(),
    }
    assert tuple(types) == OUTPUT_KEYS
    return types


def _groups(blocks: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for line in _lines(blocks):
        rows.append(_row(json.loads(line)))
        size += len(line)
        if len(rows) == GROUP_ROWS or size >= GROUP_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        yield from lines


def _row(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with (token id, log-probability) pairs as structs of named fields."""
    for sample in (record, *record.get("samples", ())):
        for token in sample.get("logprobs") or ():
            token["top"] = [{"token_id": id_, "logprob": value} for id_, value in token["top"]]
    return record
