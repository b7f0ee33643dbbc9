"""Rows of the output, and what is counted of them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.job.prompt_rows import RowId
    from wedlm_jax.completion import Completion
    from wedlm_jax.decode.logprobs import TokenLogprob


def result_row(name: RowId, completion: Completion) -> dict[str, Any]:
    """A prompt's row: its first sample, and, where it has several, all of them."""
    row = {"id": name, **_sample(completion)}
    if completion.further:
        row["samples"] = [_sample(sample) for sample in completion.samples]
    return row


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
    """JSON has no infinity: a token of probability 0 has null."""
    return value if math.isfinite(value) else None


def error_row(name: RowId | None, error: str, line: int, file: str | None) -> dict[str, Any]:
    """What stands in the place of a row that cannot be decoded.

    Args:
      name: its id; None where none could be read.
      line: its line, from 1; in Parquet its row.
      file: its file, where the job has several.
    """
    row: dict[str, Any] = {} if name is None else {"id": name}
    row |= {"error": writable(error), "line": line}
    return row if file is None else {**row, "file": writable(file)}


def writable(text: str) -> str:
    """A message may quote, and a file be called, what UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encoded(row: dict[str, Any]) -> bytes:
    """The row as a line of the output, without its end."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8")


@dataclasses.dataclass
class Counts:
    """Sums over rows of the output; the numbers of decoding are of rows without an error, all
    samples of each."""

    rows: int = 0
    error_rows: int = 0
    tokens: int = 0
    num_forwards: int = 0
    num_token_instances: int = 0

    def count(self, row: dict[str, Any]) -> None:
        self.rows += 1
        if "error" in row:
            self.error_rows += 1
            return
        for sample in row.get("samples", [row]):
            self.tokens += len(sample["token_ids"])
            self.num_forwards += sample["num_forwards"]
            self.num_token_instances += sample["num_token_instances"]

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Counts(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def as_json(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.num_forwards, 1)

    @property
    def p_cache(self) -> float:
        return self.tokens / max(self.num_token_instances, 1)
