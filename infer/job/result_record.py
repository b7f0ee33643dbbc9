"""Records of the output: what became of a prompt, as JSON."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.job.prompt_record import RecordId
    from wedlm_jax.completion import Completion
    from wedlm_jax.decode.logprobs import TokenLogprob


def result_record(name: RecordId, completion: Completion) -> dict[str, Any]:
    """Returns the result of a prompt: its first sample, and all samples if there are several."""
    record = {"id": name, **_sample(completion)}
    if completion.further:
        record["samples"] = [_sample(sample) for sample in completion.samples]
    return record


def _sample(completion: Completion) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "num_forwards": completion.num_forwards,
        "num_token_instances": completion.num_token_instances,
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


def error_record(name: RecordId | None, error: str, line: int, file: str | None) -> dict[str, Any]:
    """Returns what is written instead of a result for a record that cannot be decoded.

    Args:
      name: its id; None if none could be read.
      line: its line, from 1; in Parquet its row.
      file: its file, if the job has several.
    """
    record: dict[str, Any] = {} if name is None else {"id": name}
    record |= {"error": writable(error), "line": line}
    return record if file is None else {**record, "file": writable(file)}


def writable(text: str) -> str:
    """Escapes what UTF-8 cannot hold, which messages may quote and file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encoded(record: dict[str, Any]) -> bytes:
    """Encodes a record as a line of the output, without the line end."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8")
