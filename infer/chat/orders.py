"""Commands in a conversation: lines that begin with a slash."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from wedlm_jax.errors import InputError, nearest
from wedlm_jax.params import MODES

if TYPE_CHECKING:
    from infer.chat.conversation import Conversation
    from wedlm_jax.llm import LLM

ORDERS = {
    "/mode": f"[{'|'.join(MODES)}]  how answers are decoded",
    "/window": "[N]  masked slots decoded in parallel; 0 is autoregressive",
    "/system": "[TEXT]  the system's message; without a text, none",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does",
}

KEYS = """\
Enter sends, Alt-Enter begins a line; what is pasted may have several. Ctrl-C stops an answer."""


def is_order(line: str) -> bool:
    """Tells whether a line is a command: it begins with a slash, and has no space before it."""
    return line.startswith("/")


def follow(line: str, conversation: Conversation, llm: LLM) -> str:
    """Runs a command and returns its message.

    Raises:
      InputError: it cannot be done.
      EOFError: it asks for the end.
    """
    name, _, given = line.strip().partition(" ")
    given = given.strip()
    if name not in ORDERS:
        near = nearest(name, ORDERS)
        hint = f"did you mean {near!r}?" if near else "/help lists them"
        raise InputError(f"no command {name!r}; {hint}")
    if name == "/quit":
        raise EOFError
    if name == "/help":
        width = max(map(len, ORDERS))
        lines = (f"{order:<{width}}  {meaning}" for order, meaning in ORDERS.items())
        return "\n".join([*lines, KEYS])
    if name == "/reset":
        conversation.reset()
        return "forgotten"
    if name == "/system":
        conversation.system = given
        return "the system's message is set" if given else "no system's message"
    if name == "/mode":
        if given:
            conversation.params = dataclasses.replace(conversation.params, mode=given)
        return f"mode {conversation.params.mode}"
    if given:
        conversation.window = _window(given, llm)
    window = llm.engine.window_size if conversation.window is None else conversation.window
    return f"window {window}"


def _window(given: str, llm: LLM) -> int:
    if not given.isdecimal():
        raise InputError(f"/window: expected a number, not {given!r}")
    llm.engine.check_window(int(given))
    return int(given)
