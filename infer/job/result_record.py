"""Output records: results and errors as JSON, as columns of a Parquet file, and their sums."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from infer.job.prompt_record import BatchRecord, Extra, RecordId
from wedlm_jax.completion import Drafts
from wedlm_jax.errors import InputError
from wedlm_jax.records.columns import GROUP_ROWS, Columns, Sink, storable, write_rows

if TYPE_CHECKING:
    from wedlm_jax.completion import Completion
    from wedlm_jax.decode.logprobs import TokenLogprob

OUTPUT_KEYS = (
    "id",
    "text",
    "token_ids",
    "finish_reason",
    "num_forwards",
    "num_token_instances",
    "drafts",
    "logprobs",
    "samples",
    "prompt_token_ids",
    "error",
    "line",
    "file",
)
"""Keys of results and errors, in the order of the columns."""

DEEPEST = 100
"""Maximum nesting of a value that is copied; every encoder supports that many levels."""


class TooDeep(InputError):
    """A value is nested too deeply to be copied."""


def refuse_output_keys(extra: Iterable[str], where: str = "") -> None:
    """Refuses extra keys of a record that the output uses itself. The message begins with the
    record's place, ``where``."""
    prefix = where and f"{where}: "
    for name in extra:
        if name in OUTPUT_KEYS:
            raise InputError(
                f"{prefix}{name!r} is a key of output records, to which this record's own {name!r} "
                "would be copied; rename it"
            )


def result_record(name: RecordId | None, completion: Completion, extra: Extra) -> dict[str, Any]:
    """Returns the result of a prompt: its first sample, and all samples if there are several."""
    if isinstance(extra, BatchRecord):
        return extra.result(completion)
    record = {"id": name, **_sample(completion)}
    if completion.further:
        record["samples"] = [_sample(sample) for sample in completion.samples]
    return {**record, **extra}


def _sample(completion: Completion) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "num_forwards": completion.num_forwards,
        "num_token_instances": completion.num_token_instances,
        "drafts": completion.drafts._asdict(),
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [_logprob(token) for token in completion.logprobs]
    return fields


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    top = [[token_id, _number(logprob)] for token_id, logprob in token.top]
    return {"logprob": _number(token.logprob), "top": top}


def _number(value: float) -> float | None:
    """Returns a number as JSON: null for −inf, the log-probability of an impossible token."""
    return value if math.isfinite(value) else None


def error_record(
    name: RecordId | None, error: str, line: int, file: str | None, extra: Extra
) -> dict[str, Any]:
    """Returns what is written instead of a result for a record that cannot be decoded.

    Args:
      name: its id; None if it could not be read.
      line: its line, from 1; in Parquet its row.
      file: its file, if the job has several.
      extra: keys to copy, except those that the output uses itself.
    """
    if isinstance(extra, BatchRecord):
        return extra.error(writable(error))
    record: dict[str, Any] = {} if name is None else {"id": name}
    record |= {"error": writable(error), "line": line}
    if file is not None:
        record["file"] = writable(file)
    return record | {key: value for key, value in extra.items() if key not in OUTPUT_KEYS}


def writable(text: str) -> str:
    """Escapes what UTF-8 cannot encode, which messages and file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encoded(record: dict[str, Any]) -> bytes:
    """Encodes a record as a line of the output, without the line end."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8")


def as_json(value: Any, depth: int = 0) -> Any:
    """Converts a value of the input, which may come from a Parquet column, to JSON: times to ISO
    8601, bytes to base64, numbers that are not finite to null, other types to their text."""
    if depth > DEEPEST:
        raise TooDeep(f"a key that the output repeats is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        return {str(key): as_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, depth + 1) for item in value]
    if isinstance(value, float):
        return _number(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


@dataclasses.dataclass
class Counts:
    """Sums over output records, under the names that manifests and `stats.json` use. Tokens,
    forwards and drafts are those of all samples of the records without an error.

    Attributes:
      rows: records, including those with errors.
      error_rows: records with an error instead of a result.
      mask_drafts, lookup_drafts: drafts that were checked, by their source.
    """

    rows: int = 0
    error_rows: int = 0
    tokens: int = 0
    num_forwards: int = 0
    num_token_instances: int = 0
    mask_drafts: int = 0
    mask_drafts_accepted: int = 0
    lookup_drafts: int = 0
    lookup_drafts_accepted: int = 0

    def count(self, record: dict[str, Any]) -> None:
        self.rows += 1
        # In OpenAI's form; a result or an error may have extra keys of these names.
        is_answer = "response" in record and not record.keys() & {"token_ids", "line"}
        if is_answer:
            failed = record["response"]["status_code"] != 200
            samples = [] if failed else [record["response"]["body"]["usage"]]
        else:
            failed = "error" in record
            samples = [] if failed else record.get("samples", [record])
        self.error_rows += failed
        for sample in samples:
            self.tokens += sample["completion_tokens"] if is_answer else len(sample["token_ids"])
            self.num_forwards += sample["num_forwards"]
            self.num_token_instances += sample["num_token_instances"]
            drafts = sample["drafts"]
            self.mask_drafts += drafts["masks"]
            self.mask_drafts_accepted += drafts["masks_accepted"]
            self.lookup_drafts += drafts["lookup"]
            self.lookup_drafts_accepted += drafts["lookup_accepted"]

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Counts(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def as_json(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Counts:
        """Reads what `as_json` returned; ignores other keys."""
        return cls(**{field.name: value[field.name] for field in dataclasses.fields(cls)})

    @property
    def all_bad(self) -> bool:
        return 0 < self.rows == self.error_rows

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.num_forwards, 1)

    @property
    def p_cache(self) -> float:
        return self.tokens / max(self.num_token_instances, 1)


GROUP_BYTES = 16 * 2**20
"""Bytes of results, as JSON, after which a row group ends even with fewer than `GROUP_ROWS` rows: a
whole group is held in memory."""


def write_results(sink: Sink, lines: Iterable[bytes], columns: Columns) -> None:
    """Writes results, lines of JSON, as a Parquet file with a column for every key of
    `OUTPUT_KEYS`, used or not; ``columns`` has the types of the ids and of extra keys."""
    types = {name: storable(kind) for name, kind in columns.types.items()}
    mine = {**_result_types(), **({"id": types["id"]} if "id" in types else {})}
    write_rows(sink, _groups(lines), {**mine, **types})


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
        "prompt_token_ids": pa.list_(pa.int32()),
        "error": pa.string(),
        "line": pa.int64(),
        "file": pa.string(),
    }
    assert tuple(types) == OUTPUT_KEYS
    return types


def _groups(lines: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each row group."""
    rows: list[dict[str, Any]] = []
    size = 0
    for line in lines:
        rows.append(_row(json.loads(line)))
        size += len(line)
        if len(rows) == GROUP_ROWS or size >= GROUP_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _row(record: dict[str, Any]) -> dict[str, Any]:
    """Turns the (token id, log-probability) pairs of a record into structs with named fields."""
    for sample in (record, *record.get("samples", ())):
        for token in sample.get("logprobs") or ():
            token["top"] = [{"token_id": id_, "logprob": value} for id_, value in token["top"]]
    return record
