"""Checks conversations and converts them to the form that chat templates take.

Requests, records, questions and Python callers all use this, so that a conversation means the same
everywhere. The format of OpenAI's clients is accepted: contents in parts, null contents with tool
calls, arguments as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wedlm_jax.errors import InputError, shown_value

TEXTS = ("name", "tool_call_id", "reasoning_content")
"""Optional keys of a message whose values are texts."""

MEDIA = ("image", "audio", "video", "file")
"""Words in the type of a part that is not text."""

NEUTRAL: Mapping[str, Any] = {"refusal": None, "annotations": [], "audio": None}
"""Keys of OpenAI's answers, with the values that mean nothing; clients send such messages back."""

RESERVED = (
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
)
"""Variables that ``chat_template_kwargs`` cannot set."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that chat templates know. Templates write a role unchecked, so a misspelt one would get
into the prompt unnoticed. "function" and "ipython" are other names of "tool"."""


class NotTaken(InputError):
    """The input has something that other programs accept and this one does not."""


def check_text(value: Any) -> None:
    """Refuses a ``prompt`` that is not a text."""
    if not isinstance(value, str):
        raise InputError(f"prompt: expected a text, not {shown_value(value)}")


def checked_messages(given: Any) -> list[dict[str, Any]]:
    """Returns a conversation in the form that chat templates take: every content is a text, every
    call's arguments are an object. Unknown keys are kept, since a template may read them.

    Raises:
      InputError: a message is malformed; the error names it and what was expected.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        shown = shown_value(given)
        raise InputError(f"messages: expected a list of at least one message, not {shown}")
    return [_message(one, f"messages[{i}]") for i, one in enumerate(given)]


def template_variables(tools: Any = None, kwargs: Any = None) -> dict[str, Any]:
    """Returns the variables that a chat template is given in addition to the messages, from a
    request's or record's ``tools``, a list of objects, and ``chat_template_kwargs``, such as
    ``{"enable_thinking": False}``. Either may be its JSON, as in a table's column.

    Raises:
      InputError: a value is malformed; the message names the field and what was expected.
    """
    kwargs = _parsed(kwargs)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"chat_template_kwargs: expected an object, not {shown_value(kwargs)}")
    variables = dict(kwargs or {})
    for name in RESERVED:
        if name in variables:
            hint = "; it has its own field" if name == "tools" else ""
            raise NotTaken(f"chat_template_kwargs: {name!r} cannot be set there{hint}")
    tools = _parsed(tools)
    if not isinstance(tools, list | None) or not all(isinstance(one, dict) for one in tools or ()):
        raise InputError(f"tools: expected a list of objects, not {shown_value(tools)}")
    return variables | ({"tools": tools} if tools else {})


def _parsed(value: Any) -> Any:
    """Returns a value, parsed if it is JSON text; None for an empty text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{place}: expected an object, not {shown_value(given)}")
    # A table's row has all columns, with null for an absent value.
    fields = {name: value for name, value in given.items() if value is not None}
    for name, neutral in NEUTRAL.items():
        if name in fields and fields.pop(name) != neutral:
            raise NotTaken(f"{place}.{name}: not supported; only text is")
    role = fields.get("role")
    if role not in ROLES:
        expected = f"one of {', '.join(ROLES)}"
        raise InputError(f"{place}.role: expected {expected}, not {shown_value(role)}")
    if role == "developer":
        role = "system"  # OpenAI's newer name; templates know the older one
    if "function_call" in fields:
        raise NotTaken(f"{place}.function_call: not supported; use tool_calls")
    for name in TEXTS:
        if not isinstance(fields.get(name, ""), str):
            raise InputError(f"{place}.{name}: expected a text, not {shown_value(fields[name])}")
    calls = fields.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise InputError(f"{place}.tool_calls: expected a list, not {shown_value(calls)}")
    fields |= {"role": role, "content": _content(fields, bool(calls), f"{place}.content")}
    if calls:
        fields["tool_calls"] = [
            _call(one, f"{place}.tool_calls[{i}]") for i, one in enumerate(calls)
        ]
    return fields


def _content(fields: Mapping[str, Any], calls: bool, place: str) -> str:
    """Returns a message's content as one text, with its parts joined."""
    content = fields.get("content")
    if content is None and (calls or fields.get("reasoning_content")):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        shown = shown_value(content)
        raise InputError(f"{place}: expected a text or a list of text parts, not {shown}")
    return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and any(word in kind for word in MEDIA):
        raise NotTaken(f"{place}: {kind!r} is not supported; this model reads only text")
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise InputError(
            f'{place}: expected {{"type": "text", "text": ...}}, not {shown_value(part)}'
        )
    return text


def _call(call: Any, place: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, which templates write as JSON; a text
    would be written within quotes."""
    if not isinstance(call, Mapping):
        raise InputError(f"{place}: expected an object, not {shown_value(call)}")
    function = call.get("function")
    inner = call if function is None else function
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise InputError(f"{place}: expected a function with a name, not {shown_value(call)}")
    arguments = _parsed(inner.get("arguments"))
    if arguments is not None and not isinstance(arguments, Mapping):
        shown = shown_value(inner.get("arguments"))
        raise InputError(f"{place}: expected arguments that are a JSON object, not {shown}")
    plain = {**inner, "arguments": dict(arguments or {})}
    return plain if function is None else {**call, "function": plain}
