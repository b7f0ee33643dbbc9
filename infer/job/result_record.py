"""Records of the output: what became of a prompt, as JSON."""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from infer.job.openai_record import BatchRecord
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from infer.job.prompt_record import RecordId
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
    "error",
    "line",
    "file",
)
"""The keys of results, and of errors in their place."""

DEEPEST = 100
"""Levels of a value that is passed on: no encoder fails on so many."""


class TooDeep(InputError):
    """A value that is nested too deep to be passed on."""


def refuse_output_keys(own: Iterable[str]) -> None:
    """Refuses keys of a user's own that the output has for itself."""
    for name in own:
        if name in OUTPUT_KEYS:
            raise InputError(
                f"{name!r} is a key of the output, where this record's own {name!r} would stand "
                "too; rename it"
            )


def result_record(
    name: RecordId, completion: Completion, own: Mapping[str, Any] | BatchRecord
) -> dict[str, Any]:
    """Returns the result of a prompt: its first sample, and all samples if there are several.

    Args:
      own: keys of the input's record that are passed on; or the envelope of a request, whose answer
        has another form.
    """
    if isinstance(own, BatchRecord):
        return own.result(completion)
    record = {"id": name, **_sample(completion)}
    if completion.further:
        record["samples"] = [_sample(sample) for sample in completion.samples]
    return {**record, **own}


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
    name: RecordId | None,
    error: str,
    line: int,
    file: str | None,
    own: Mapping[str, Any] | BatchRecord,
) -> dict[str, Any]:
    """Returns what is written instead of a result for a record that cannot be decoded.

    Args:
      name: its id; None if none could be read.
      line: its line, from 1; in Parquet its row.
      file: its file, if the job has several.
      own: keys of the input's record that are passed on, unless the output has them; or the
        envelope of a request.
    """
    if isinstance(own, BatchRecord):
        return own.error(writable(error))
    record: dict[str, Any] = {} if name is None else {"id": name}
    record |= {"error": writable(error), "line": line}
    if file is not None:
        record["file"] = writable(file)
    return record | {key: value for key, value in own.items() if key not in OUTPUT_KEYS}


def writable(text: str) -> str:
    """Escapes what UTF-8 cannot hold, which messages may quote and file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encoded(record: dict[str, Any]) -> bytes:
    """Encodes a record as a line of the output, without the line end."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8")


def as_json(value: Any, depth: int = 0) -> Any:
    """Returns a value of the input, which may be that of a Parquet column, as JSON has it: times as
    ISO 8601, bytes as base64, what else there is as its text, and null for numbers that are not
    finite.

    Raises:
      TooDeep: it is nested deeper than `DEEPEST`.
    """
    if depth > DEEPEST:
        raise TooDeep(f"a key that is passed on is nested more than {DEEPEST} deep")
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
