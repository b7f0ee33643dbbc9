"""What may stand in a field of a record, checked and shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wedlm_jax.errors import InputError, did_you_mean, shortened


def refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    """Refuses a name that is not one of ``known``, with a hint."""
    for name in fields:
        if name not in known:
            shown = shortened(name, 60)
            raise InputError(f"unknown {what} {shown!r}; {did_you_mean(shown, known)}")


def check_text(value: Any) -> None:
    """Refuses a ``prompt`` that is no text."""
    if not isinstance(value, str):
        raise InputError(f"prompt: expected a text, not {shown_value(value)}")


def shown_value(value: Any) -> str:
    """Formats a value for a message, shortened."""
    try:
        # Parquet has values that JSON does not have, such as dates.
        return shortened(json.dumps(value, ensure_ascii=False, default=repr), 60)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
