"""Reads values of sampling options that may be given in several ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from wedlm_jax.errors import InputError, shortened


def is_token_id(value: object) -> bool:
    """Tells whether a value can be the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def as_bias(given: Any) -> dict[int, float]:
    """Returns ``logit_bias`` by token id; JSON keys are texts, so ids may be texts."""
    refusal = "logit_bias: expected an object of token ids and numbers from -100 to 100"
    if not isinstance(given or {}, Mapping):
        raise InputError(f"{refusal}, not {given!r}")
    bias: dict[int, float] = {}
    for key, value in (given or {}).items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_token_id(token) or not number or not -100 <= value <= 100:
            raise InputError(f"{refusal}, not {key!r}: {value!r}")
        bias[token] = value
    return bias


def as_words(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """Returns ``bad_words`` as texts and tuples of token ids; one text is a list of one."""
    words: list[str | tuple[int, ...]] = []
    if given is not None and not isinstance(given, str | list | tuple):
        raise InputError(f"bad_words: expected texts or lists of token ids, not {given!r}")
    for word in (given,) if isinstance(given, str) else given or ():
        if isinstance(word, str) and word.strip():
            words.append(word)
        elif isinstance(word, list | tuple) and word and all(map(is_token_id, word)):
            words.append(tuple(word))
        else:
            raise InputError(f"bad_words: expected texts or lists of token ids, not {word!r}")
    return tuple(words)


def as_schema(given: Any) -> str | None:
    """Returns ``json_schema`` as a text of JSON, which can be hashed and compared. Its keys keep
    their order: it is that of the completion's."""
    refusal = "json_schema: expected a JSON schema, an object or its text"
    if given is None:
        return None
    try:
        schema = json.loads(given, parse_constant=_refuse) if isinstance(given, str) else given
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{refusal} ({shortened(str(error))})") from None
    if not isinstance(schema, Mapping):
        raise InputError(f"{refusal}, not {shortened(text, 60)}")
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
