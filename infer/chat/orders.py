"""Commands in a conversation: lines that begin with a slash."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from infer.chat.lines import keys
from wedlm_jax.errors import InputError, counted, nearest
from wedlm_jax.host.atomic import written_beside
from wedlm_jax.params import MODES

if TYPE_CHECKING:
    from infer.chat.conversation import Conversation
    from wedlm_jax.llm import LLM

ORDERS = {
    "/mode": f"[{'|'.join(MODES)}]  how answers are decoded",
    "/window": "[N|auto]  masks that draft in parallel; 0 decodes autoregressively",
    "/temperature": "[X]  0 takes the likeliest tokens, 1 samples as the model says",
    "/system": "[TEXT]  the system's message; without a text, none",
    "/retry": "answer the last message again with another seed, which matters above temperature 0",
    "/save": "FILE  write the conversation as JSON, a line as `wedlm generate --input` takes",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does",
}


def is_order(line: str) -> bool:
    """Returns whether a line is a command: it begins with a slash, and has no space before it."""
    return line.startswith("/")


def is_retry(line: str) -> bool:
    """Returns whether a line asks for another answer to the last message."""
    return line.strip() == "/retry" and is_order(line)


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
        return "\n".join([*lines, keys()])
    if name == "/reset":
        conversation.reset()
        return "forgotten"
    if name == "/system":
        conversation.system = given
        return "the system's message is set" if given else "no system's message"
    if name == "/retry":
        raise InputError(f"/retry: expected nothing after it, not {given!r}")
    if name == "/save":
        return _save(given, conversation)
    if name == "/mode":
        if given:
            conversation.params = dataclasses.replace(conversation.params, mode=given)
        return f"mode {conversation.params.mode}"
    if name == "/temperature":
        if given:
            temperature = _number(given)
            conversation.params = dataclasses.replace(conversation.params, temperature=temperature)
        return f"temperature {conversation.params.temperature:g}"
    if given:
        conversation.window = _window(given, llm)
    window = llm.engine.window_size if conversation.window is None else conversation.window
    if window == 0 and not llm.engine.config.knows_masks:
        return f"window 0: {llm.name} was not trained on masks"
    return f"window {window}"


def _number(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        raise InputError(f"/temperature: expected a number, not {given!r}") from None


def _save(given: str, conversation: Conversation) -> str:
    if not given:
        raise InputError("/save: expected the name of a file")
    if not conversation.has_template:
        raise InputError("/save: without a chat template there is no conversation")
    path, messages = Path(given).expanduser(), conversation.messages
    if path.exists():
        raise InputError(f"/save: {path} is there already")
    with written_beside(path) as file:
        line = json.dumps({"messages": messages}, ensure_ascii=False)
        file.write(line.encode("utf-8", "replace") + b"\n")
    return f"{counted(len(messages), 'message')} in {path}"


def _window(given: str, llm: LLM) -> int | None:
    """Returns W of the answers to come; None for the engine's."""
    if given == "auto" and (llm.engine.window_size == "auto" or not llm.engine.config.knows_masks):
        return None
    if given == "auto":
        raise InputError("/window: auto is chosen when a chat begins, by --window-size auto")
    if not given.isdecimal():
        raise InputError(f"/window: expected a number, not {given!r}")
    try:
        llm.engine.check_window(int(given))
    except InputError as error:
        raise InputError(f"/window: {str(error).removeprefix('window_size: ')}") from None
    return int(given)
