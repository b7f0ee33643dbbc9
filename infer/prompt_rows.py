"""Rows of a JSONL file of prompts: read, checked, and turned into token ids."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax.errors import InputError
from wedlm_jax.sampling import SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM, Row

PROMPT_KINDS = ("prompt", "prompt_token_ids", "messages")
KEYS = (*PROMPT_KINDS, "id", "sampling")
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
SEEDS = 2**32


@dataclasses.dataclass(slots=True)
class PromptRow:
    """One row as it stands in the file.

    Attributes:
      line: its line, from 1.
      id: what the output row is called.
      kind: which of `PROMPT_KINDS` it has.
      prompt: that prompt.
      params: how it is decoded.
    """

    line: int
    id: str | int
    kind: str
    prompt: Any
    params: SamplingParams


def read_rows(path: Path, params: SamplingParams) -> tuple[list[PromptRow], str]:
    """Reads and checks every row, as far as that needs no model.

    Lines of white space only are no rows.

    Args:
      path: a JSONL file, or a pipe; it is read once.
      params: of rows that do not say otherwise. A row's seed is this one plus its number,
        so that equal prompts are sampled differently.

    Returns:
      The rows, and a digest of the file's bytes.

    Raises:
      InputError: naming the file and the first line that is no row, and why.
    """
    rows: list[PromptRow] = []
    lines_of_ids: dict[str | int, int] = {}
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, 1):
                digest.update(raw)
                try:
                    text = _decode(raw, line).strip()
                    if not text:
                        continue
                    seed = (params.seed + len(rows)) % SEEDS
                    row = _row(text, line, len(rows), dataclasses.replace(params, seed=seed))
                    first = lines_of_ids.setdefault(row.id, line)
                    if first != line:
                        raise InputError(
                            f"id {row.id!r} is that of line {first} already (a row without an id "
                            "takes its number, from 0)"
                        )
                except InputError as error:
                    raise InputError(f"{path} line {line}: {error}") from None
                rows.append(row)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return rows, digest.hexdigest()


def prepare_rows(llm: LLM, path: Path, rows: Iterable[PromptRow], *, chat: bool) -> list[Row]:
    """Token ids of every row, checked against the model.

    Args:
      chat: texts are a user's message, for the chat template.

    Raises:
      InputError: naming the file and the first line that cannot be decoded, and why.
    """
    prepared: list[Row] = []
    for row in rows:
        try:
            prompt = row.prompt
            if row.kind == "prompt" and chat:
                prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
            elif row.kind == "messages":
                prompt = llm.chat_prompt(prompt)
            token_ids, params = llm.prepare_one(prompt, row.params)
        except InputError as error:
            raise InputError(f"{path} line {row.line}: {error}") from None
        prepared.append((array("i", token_ids), params))  # a list takes nine times the memory
        row.prompt = None
    return prepared


def _decode(raw: bytes, line: int) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw:
        raise InputError("expected UTF-8 text, but this is UTF-16 or binary")
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError:
        raise InputError("expected UTF-8 text, but this is another encoding or binary") from None


def _row(text: str, line: int, number: int, params: SamplingParams) -> PromptRow:
    fields = _json_object(text)
    _refuse_unknown(fields, KEYS, "key")
    kinds = [kind for kind in PROMPT_KINDS if kind in fields]
    if len(kinds) != 1:
        have = " and ".join(kinds) or "none"
        raise InputError(f"expected exactly one of {', '.join(PROMPT_KINDS)}; the row has {have}")
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InputError(f"id: expected a text or an integer, not {_shown(name)}")
    _CHECKS[kinds[0]](fields[kinds[0]])
    if "sampling" in fields:
        params = _overridden(params, fields["sampling"])
    return PromptRow(line, name, kinds[0], fields[kinds[0]], params)


def _json_object(text: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"key {twice!r} stands there twice")
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


def _refuse_unknown(fields: dict[str, Any], known: Sequence[str], what: str) -> None:
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise InputError(f"unknown {what} {name!r}; {hint}")


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
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
