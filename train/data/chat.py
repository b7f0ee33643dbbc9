"""Turns conversations into samples: reads them from a record, renders them with the chat template,
and marks the assistant's turns.

A turn that is trained on begins where the template stops when asked for the assistant's turn, so it
is what the model will have to write after a prompt. It ends with the special token that the
template puts after the turn's content.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from wedlm_jax.errors import InputError
from wedlm_jax.messages import ROLES, NotTaken, checked_messages, template_variables
from wedlm_jax.packing import TokenisedSample
from wedlm_jax.typed_tokens import MARK

BESIDE = ("system", "tools", "chat_template_kwargs")
"""Keys that change the text, in addition to ``messages`` or ``conversations``."""

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
    """Raised with the reason and detail for leaving out a record, where file and line are not
    known."""


Message = dict[str, Any]
Variables = Mapping[str, Any]

ASSISTANT = "assistant"


class Conversation(NamedTuple):
    """The input of a chat template.

    Attributes:
      messages: messages with ``role`` and ``content``, which are texts, and any other keys.
      variables: variables of the template: ``tools`` and a record's ``chat_template_kwargs``.
      unread: keys of turns that are not read.
    """

    messages: list[Message]
    variables: Variables
    unread: list[str]


def conversation_of(record: Mapping[str, Any], key: str) -> Conversation:
    """Reads a record with the key "messages" or "conversations"; raises `Wrong`."""
    turns, unread = record[key], list[str]()
    if key == "conversations":
        turns, unread = _from_sharegpt(turns)
    messages = _with_system(_checked(turns), record.get("system"))
    if not any(message["role"] == ASSISTANT for message in messages):
        raise Wrong("no assistant turn")
    with _named():
        variables = template_variables(record.get("tools"), record.get("chat_template_kwargs"))
    return Conversation(messages, variables, unread)


def _checked(given: Any) -> list[Message]:
    """Returns messages as the template takes them, without the weights that some programs add."""
    for number, one in enumerate(given if isinstance(given, list) else []):
        role = one.get("role", "user") if isinstance(one, dict) else "user"
        if isinstance(role, str) and role not in ROLES:
            known = ", ".join(ROLES)
            raise Wrong("unknown role", f"{role!r} of messages[{number}]; there are {known}")
    with _named():
        messages = checked_messages(given)
    for number, message in enumerate(messages):
        if (weight := message.pop("weight", 1)) != 1:
            # Training on the turn anyway would teach what it was marked not to.
            raise Wrong("not supported", f"'weight' {weight!r} of messages[{number}]; expected 1")
    return messages


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Turns an `InputError` into the reason for leaving out a record."""
    try:
        yield
    except NotTaken as error:
        raise Wrong("not supported", str(error)) from None
    except InputError as error:
        raise Wrong("wrong type", str(error)) from None


PAIRS = {"prompt": ("completion",), "instruction": ("output", "input")}
"""Keys of a prompt, each with the key of its completion and those of what else belongs to it."""


def pair_of(record: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Returns the prompt and the completion of a record, given its key in `PAIRS`; raises `Wrong`.
    An ``instruction`` may have an ``input``, which follows it after an empty line."""
    completion, *further = PAIRS[key]
    texts = [whole_text(record[key], key)]
    for name in further:
        if record.get(name) not in (None, ""):
            texts.append(whole_text(record[name], name))
    return "\n\n".join(texts), whole_text(record[completion], completion)


def _from_sharegpt(turns: Any) -> tuple[list[Message], list[str]]:
    """Converts ``[{"from": ..., "value": ...}, ...]`` to messages; also returns the keys of turns
    that are not read."""
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


def _with_system(messages: list[Message], system: Any) -> list[Message]:
    """Puts a record's own system message first, unless it is there already."""
    if system is None or system == "":
        return messages
    whole_text(system, "system")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise Wrong("two system messages", "'system', and the first message, which differs")
    return messages


def whole_text(value: Any, name: str) -> str:
    """Returns a value that must be a text, and not an empty one."""
    if not isinstance(value, str):
        raise Wrong("wrong type", f"{name} must be a text")
    if not value:
        raise Wrong("empty", name)
    return value


Render = Callable[[Sequence[Message], bool, Variables], str]
"""(messages, whether to ask for the assistant's turn, other variables of the template) to text;
raises `InputError`."""

HIDDEN = "turns not found in the chat template's text"

_PROBE = [
    {"role": "user", "content": "Hello"},
    {"role": ASSISTANT, "content": "Hi."},
    {"role": "user", "content": "More?"},
    {"role": ASSISTANT, "content": "No."},
]


class ChatFormat:
    """Joins a chat template and its tokenizer.

    Args:
      render: the template.
      tokenizer: the tokenizer, which gives the ids of the text and knows the special tokens.
      end_tokens: number of additional, trainable end tokens after a turn.
      encode_marked: returns the ids of a text in which special tokens are marked as text
        (`wedlm_jax.typed_tokens`).

    Raises:
      InputError: the template does not show where an assistant's turn begins or ends.

    Attributes:
      turn_end: the id of the token that ends an assistant's turn.
    """

    def __init__(
        self,
        render: Render,
        tokenizer: Tokenizer,
        end_tokens: int,
        encode_marked: Callable[[str], list[int]] | None = None,
    ):
        self._render, self._tokenizer, self._extra = render, tokenizer, end_tokens
        self._encode_marked = encode_marked
        added = tokenizer.get_added_tokens_decoder().values()
        special = sorted((t.content for t in added if t.special), key=len, reverse=True)
        end = rf"\s*({'|'.join(map(re.escape, special)) or '(?!)'})"
        self._end, self._at_end = re.compile(end), re.compile(rf"{end}\Z")
        try:
            whole, spans = self.turns(_PROBE)
        except Wrong as wrong:
            raise InputError(
                f"this tokenizer's chat template cannot be trained on: {wrong.args[-1]}"
            ) from None
        start, stop = spans[-1]
        self.turn_end = self._ids(whole[start:stop])[-1]
        found = self._at_end.search(whole[start:stop])
        assert found is not None, "a turn ends with it"
        self._turn_end = re.compile(re.escape(found[1]))

    def turns(
        self, messages: Sequence[Message], variables: Variables | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the whole text, and ``[start, stop)`` of each assistant's turn in it, including
        its end token.

        Args:
          variables: further variables of the template, such as ``tools``.

        Raises:
          Wrong: the template refuses the messages, writes them in a way that hides the turns, or
            leaves out the tools.
        """
        variables = variables or {}

        def render(
            messages: Sequence[Message], ask: bool = False, variables: Variables = variables
        ) -> str:
            try:
                return self._render(messages, ask, variables)
            except InputError as error:
                raise Wrong("refused by the chat template", str(error)) from None

        whole = render(messages)
        if "tools" in variables:
            without = {name: value for name, value in variables.items() if name != "tools"}
            if render(messages, variables=without) == whole:
                raise Wrong(
                    "tools not found in the chat template's text",
                    "it writes the same text without them",
                )
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = render(messages[:number], True)
            if not whole.startswith(prompt):
                raise Wrong(
                    HIDDEN,
                    "it writes the text before an assistant's turn differently once the turn is "
                    "there",
                )
            # The text after a turn is the same whatever the turn says.
            varied = render([*messages[:number], _varied(message), *messages[number + 1 :]])
            after = _common_ending(whole[len(prompt) :], varied[len(prompt) :])
            if message.get("tool_calls"):
                # The template closes a call in its own way, perhaps with special tokens.
                end = self._turn_end.search(whole, len(whole) - after)
            else:
                end = self._end.match(whole, len(whole) - after)
            if end is None:
                raise Wrong(HIDDEN, "it does not end an assistant's turn with a special token")
            spans.append((len(prompt), end.end()))
        return whole, spans

    def tokenised(
        self, whole: str, spans: Sequence[tuple[int, int]], *, train_on_prompt: bool
    ) -> TokenisedSample:
        """Returns the token ids of a conversation, given what `turns` returned; only the
        assistant's turns are trainable, unless ``train_on_prompt``. What follows the last trainable
        token is left out.

        Turns and the text between them are tokenised separately, as a prompt and its answer are.
        """
        tokens: list[int] = []
        trainable: list[bool] = []

        def add(ids: list[int], flag: bool) -> None:
            tokens.extend(ids)
            trainable.extend([flag or train_on_prompt] * len(ids))

        last = 0
        for start, stop in spans:
            add(self._ids(whole[last:start]), False)
            turn = self._ids(whole[start:stop])
            add(turn + turn[-1:] * self._extra, True)
            last = stop
        if train_on_prompt:
            add(self._ids(whole[last:]), False)
        return TokenisedSample(np.array(tokens, np.int32), np.array(trainable, bool))

    def changed(
        self, messages: Sequence[Message], whole: str, spans: Sequence[tuple[int, int]]
    ) -> list[tuple[str, str]]:
        """Returns (content, text) of each assistant's turn whose text differs from its content as
        written, apart from surrounding white space.

        Args:
          whole, spans: what `turns` returned for these messages.
        """
        found = []
        own = [message for message in messages if message["role"] == ASSISTANT]
        for message, (start, stop) in zip(own, spans, strict=True):
            written = message["content"].strip()
            became = self._at_end.sub("", whole[start:stop]).strip()
            # The template may write thoughts and calls with separate keys in its own way.
            more = message.get("reasoning_content") or message.get("tool_calls")
            if (written not in became) if more else (written != became):
                found.append((written, became))
        return found

    def _ids(self, text: str) -> list[int]:
        if MARK in text and self._encode_marked is not None:
            return self._encode_marked(text)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _varied(message: Message) -> Message:
    """Returns an assistant's message that ends differently: in its content or, if it has calls, in
    the arguments of the last one."""
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": _unlike(message["content"])}
    last = calls[-1]
    inner = last.get("function", last)
    arguments = json.dumps(inner["arguments"], ensure_ascii=False).rstrip('"}] ')
    other = {**inner, "arguments": {"other": _unlike(arguments)}}
    return {
        **message,
        "tool_calls": [*calls[:-1], {**last, "function": other} if "function" in last else other],
    }


def _unlike(content: str) -> str:
    """Returns a text whose last character is not that of ``content``, trimmed or not."""
    taken = content[-1:] + content.rstrip()[-1:]
    return next(letter for letter in "xyz" if letter not in taken)


def _common_ending(one: str, other: str) -> int:
    """Counts the characters that two texts have in common at the end."""
    longest = min(len(one), len(other))
    return next((n for n in range(longest) if one[-1 - n] != other[-1 - n]), longest)
