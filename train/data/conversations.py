"""A conversation in a record: its messages, and what else its chat template is given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wedlm_jax.errors import InputError
from wedlm_jax.messages import ROLES, NotTaken, checked_messages, template_variables

BESIDE = ("system", "tools", "chat_template_kwargs")
"""Keys beside ``messages`` or ``conversations`` that change the text."""

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
"""Role in a chat template by the ``from`` of a ShareGPT turn."""

SHAREGPT_KEYS = ("from", "value", "weight")


class Wrong(Exception):
    """Holds the reason and detail for which a record is left out, where file and line are not
    known."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Holds what a chat template is given.

    Attributes:
      messages: with ``role`` and ``content``, which are texts, and whatever else they have.
      variables: of the template, by name: ``tools`` and a record's ``chat_template_kwargs``.
      unread: keys of turns that nothing reads.
    """

    messages: Sequence[dict[str, Any]]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unread: Sequence[str] = ()

    @classmethod
    def of_record(cls, record: Mapping[str, Any], key: str) -> Conversation:
        """Reads a record.

        Args:
          key: "messages" or "conversations", which it has.

        Raises:
          Wrong: it is malformed.
        """
        unread: list[str] = []
        turns = record[key]
        if key == "conversations":
            turns, unread = _from_sharegpt(turns)
        messages = _with_system(_checked(turns), record.get("system"))
        if not any(message["role"] == "assistant" for message in messages):
            raise Wrong("no assistant turn")
        with _named():
            variables = template_variables(record.get("tools"), record.get("chat_template_kwargs"))
        return cls(messages, variables, unread)


def _checked(given: Any) -> list[dict[str, Any]]:
    """Returns messages as the template takes them, without the weights of some programs."""
    for number, one in enumerate(given if isinstance(given, list) else []):
        role = one.get("role", "user") if isinstance(one, dict) else "user"
        if isinstance(role, str) and role not in ROLES:
            known = ", ".join(ROLES)
            raise Wrong("unknown role", f"{role!r} of messages[{number}]; there are {known}")
    with _named():
        messages = checked_messages(given)
    for number, message in enumerate(messages):
        if (weight := message.pop("weight", 1)) != 1:
            # Trained on all the same, the turn would teach what it was marked not to.
            raise Wrong("not supported", f"'weight' {weight!r} of messages[{number}]; expected 1")
    return messages


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Turns an `InputError` into the reason for which a record is left out."""
    try:
        yield
    except NotTaken as error:
        raise Wrong("not supported", str(error)) from None
    except InputError as error:
        raise Wrong("wrong type", str(error)) from None


PAIRS = {"prompt": ("completion",), "instruction": ("output", "input")}
"""Keys of a prompt, and those beside it: of its completion, and of what else belongs to it."""


def pair_of(record: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Returns the prompt of a record, and the completion that is to follow it.

    Args:
      key: of `PAIRS`, which it has. An ``instruction`` may have an ``input``, which follows it
        after an empty line.

    Raises:
      Wrong: it is malformed.
    """
    completion, *further = PAIRS[key]
    texts = [whole_text(record[key], key)]
    for name in further:
        if record.get(name) not in (None, ""):
            texts.append(whole_text(record[name], name))
    return "\n\n".join(texts), whole_text(record[completion], completion)


def _from_sharegpt(turns: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Converts ``[{"from": ..., "value": ...}, ...]`` to messages; returns keys of turns that are
    not read, too."""
    if not isinstance(turns, list) or not turns:
        raise Wrong("wrong type", "conversations must be a list of at least one turn")
    messages, unread = [], dict[str, None]()
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise Wrong("wrong type", f"turn {number} must be an object")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise Wrong("unknown speaker", f"'from' of turn {number} must be one of {known}")
        message = {"role": SHAREGPT_ROLES[speaker], "content": turn.get("value")}
        messages.append(message | ({"weight": turn["weight"]} if "weight" in turn else {}))
        unread |= dict.fromkeys(f"conversations.{key}" for key in turn if key not in SHAREGPT_KEYS)
    return messages, list(unread)


def _with_system(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Puts a record's own system message first, unless it is there already."""
    if system is None or system == "":
        return messages
    whole_text(system, "system")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise Wrong("two system messages", "'system', and the first message, which differs")
    return messages


def whole_text(value: Any, name: str, *, empty: bool = False) -> str:
    """Returns a value that must be a text, and, unless ``empty``, not an empty one."""
    if not isinstance(value, str):
        raise Wrong("wrong type", f"{name} must be a text")
    if not value and not empty:
        raise Wrong("empty", name)
    return value
