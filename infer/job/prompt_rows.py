"""One row: its fields checked, its id, its seed, and what the decoder takes."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infer.job.parquet import KEYS, PROMPT_KINDS
from infer.job.records import LARGEST_LINE, Content, TooLong
from wedlm_jax.errors import InputError, did_you_mean
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.generation import Prepared
    from wedlm_jax.llm import LLM

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))

RowId = str | int


@dataclasses.dataclass(slots=True)
class PromptRow:
    """A row that is what it should be, as far as that can be told without the model.

    Attributes:
      id: what the output row is called.
      kind: which of `PROMPT_KINDS` it has.
      prompt: that prompt.
      params: how it is decoded.
    """

    id: RowId
    kind: str
    prompt: Any
    params: SamplingParams


def row_fields(content: Content) -> Mapping[str, Any]:
    """The keys and values of a row.

    Raises:
      InputError: it is not JSON, or no object.
    """
    if isinstance(content, TooLong):
        raise InputError(f"longer than {LARGEST_LINE // 2**20} MiB, which is the most for a line")
    if isinstance(content, bytes):
        return _json_object(_decode(content).strip())
    return content


def row_id(fields: Mapping[str, Any], number: int) -> RowId:
    """The row's id, or else its number in the whole input, from 0.

    Raises:
      InputError: it has an id that is neither text nor integer.
    """
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InputError(f"id: expected a text or an integer, not {_shown(name)}")
    return name


def checked_row(fields: Mapping[str, Any], name: RowId, params: SamplingParams) -> PromptRow:
    """The row, its seed drawn from its id unless it names one.

    Args:
      params: of rows that do not say otherwise; its seed is the job's.

    Raises:
      InputError: which field is wrong, and what was expected.
    """
    _refuse_unknown(fields, KEYS, "key")
    kinds = [kind for kind in PROMPT_KINDS if kind in fields]
    if len(kinds) != 1:
        have = " and ".join(kinds) or "none"
        raise InputError(f"expected exactly one of {', '.join(PROMPT_KINDS)}; the row has {have}")
    _CHECKS[kinds[0]](fields[kinds[0]])
    if params.seed is not None:
        params = dataclasses.replace(params, seed=row_seed(params.seed, name))
    if "sampling" in fields:
        params = _overridden(params, fields["sampling"])
    if params.seed is None:
        raise InputError("seed: expected a number, which gives the same row after a restart")
    return PromptRow(name, kinds[0], fields[kinds[0]], params)


def row_seed(seed: int, name: RowId) -> int:
    """A row's seed, 32 bits: of the job's seed and the row's id, and of nothing else, so that
    it is the same wherever and with whomever the row is decoded."""
    text = json.dumps([seed, name])
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:4], "big")


def prepared_row(llm: LLM, row: PromptRow, *, chat: bool) -> Prepared:
    """Its token ids and parameters, checked against the model.

    Args:
      chat: a text is a user's message, for the chat template.

    Raises:
      InputError: the model cannot decode it, and why.
    """
    prompt = row.prompt
    try:
        if row.kind == "prompt" and chat:
            prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
        elif row.kind == "messages":
            prompt = llm.chat_prompt(prompt)
        token_ids, params = llm.prepare_one(prompt, row.params, many_samples=True)
    except InputError:
        raise
    except Exception as error:
        # Tokenizers and templates are programs of others: what one row makes them do must
        # not end a job of millions.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(f"the row could not be turned into tokens ({reason})") from error
    return array("i", token_ids), params  # a list takes nine times the memory


def _decode(raw: bytes) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw:
        raise InputError("expected UTF-8 text, but this is UTF-16 or binary")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("expected UTF-8 text, but this is another encoding or binary") from None


def _json_object(text: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = collections.Counter(name for name, _ in pairs)
            twice = counts.most_common(1)[0][0]
            raise InputError(f"key {_cut(twice)!r} stands there twice")
        return result

    def no_constant(name: str) -> None:
        raise InputError(f"not valid JSON ({name} is no number there)")

    try:
        value = json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
        # Half a character, which JSON can spell but no file can hold.
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except InputError:
        raise
    except UnicodeEncodeError:
        raise InputError("a text has half of a surrogate pair (\\ud800 to \\udfff)") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON that can be read ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"expected a JSON object, not {_shown(value)}")
    return value


def _refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name in fields:
        if name not in known:
            raise InputError(f"unknown {what} {_cut(name)!r}; {did_you_mean(_cut(name), known)}")


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        raise InputError(f"prompt: expected a text, not {_shown(value)}")


def _check_token_ids(value: Any) -> None:
    if not _is_list_of_integers(value):
        raise InputError(f"prompt_token_ids: expected a list of integers, not {_shown(value)}")


def _check_messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise InputError(f"messages: expected a list of at least one, not {_shown(value)}")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise InputError(f"messages[{i}]: expected an object, not {_shown(message)}")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise InputError(f"messages[{i}]: expected a text as {name!r}")


_CHECKS = {
    "prompt": _check_text,
    "prompt_token_ids": _check_token_ids,
    "messages": _check_messages,
}


def _overridden(params: SamplingParams, fields: Any) -> SamplingParams:
    """``params`` with a row's own values."""
    if not isinstance(fields, dict):
        raise InputError(f"sampling: expected an object, not {_shown(fields)}")
    _refuse_unknown(fields, SAMPLING_FIELDS, "sampling field")
    stop, stop_ids = fields.get("stop", []), fields.get("stop_token_ids", [])
    if not isinstance(stop, str | list):
        raise InputError(f"sampling.stop: expected a text or a list of texts, not {_shown(stop)}")
    if not _is_list_of_integers(stop_ids):
        raise InputError(
            f"sampling.stop_token_ids: expected a list of integers, not {_shown(stop_ids)}"
        )
    try:
        return dataclasses.replace(params, **fields)
    except InputError as error:
        raise InputError(f"sampling.{error}") from None


def _is_list_of_integers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )


def _shown(value: Any) -> str:
    """A value in a message, cut short."""
    try:
        # Parquet has values that JSON has not.
        return _cut(json.dumps(value, ensure_ascii=False, default=repr))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
