"""Input from a terminal or a pipe: messages, and commands to the program itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from wedlm_jax.errors import InputError, counted, nearest
from wedlm_jax.host.atomic import written_beside
from wedlm_jax.params import MODES

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

    from infer.chat.conversation import Conversation
    from wedlm_jax.llm import LLM

EDITED_KEYS = "Enter sends, Alt-Enter begins a new line; pasted text may have several lines."
PLAIN_KEYS = "Enter sends; a line that ends in a backslash continues on the next."
PLAIN = "plain input, as prompt_toolkit is not installed: pip install 'wedlm-jax[chat]'"


ORDERS = {
    "/mode": f"[{'|'.join(MODES)}]  how answers are decoded",
    "/window": "[N|auto]  masks that draft in parallel; 0 decodes autoregressively",
    "/temperature": "[X]  0 takes the most likely tokens, 1 samples from the model's probabilities",
    "/system": "[TEXT]  set the system message; without TEXT, remove it",
    "/retry": "answer the last message again with another seed, which matters above temperature 0",
    "/save": "FILE  write the conversation as a line of JSON for `wedlm generate --input`",
    "/reset": "forget the conversation",
    "/help": "show this list",
    "/quit": "end the chat, like Ctrl-D",
}


def keys() -> str:
    """Returns the help on keys: with prompt_toolkit, or for plain input."""
    known = sys.modules.get("prompt_toolkit") is not None
    return f"{EDITED_KEYS if known else PLAIN_KEYS} Ctrl-C stops an answer."


def line_reader(stdin: TextIO) -> Callable[[], str]:
    """Returns a function that returns the next message.

    It raises EOFError after the last one, and at a terminal KeyboardInterrupt when a line is
    cancelled.
    """
    if stdin.isatty() and sys.stdout.isatty():
        return _from_terminal()
    return lambda: _from_pipe(stdin)


def _from_pipe(stdin: TextIO) -> str:
    """Returns a line; one that ends in a backslash continues on the next."""
    message = ""
    while True:
        try:
            line = stdin.readline()
        except UnicodeDecodeError:
            raise InputError("expected UTF-8 text on standard input") from None
        if not line and not message:
            raise EOFError
        message += line.removesuffix("\n").removesuffix("\r")
        if not line or not message.endswith("\\"):
            return message
        message = message[:-1] + "\n"


def _from_terminal() -> Callable[[], str]:
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        print(PLAIN, file=sys.stderr, flush=True)
        return _from_plain_terminal
    session: PromptSession[str] = PromptSession(
        "> ",
        history=_history(),
        key_bindings=_keys(),
        prompt_continuation=lambda width, *_: " " * width,
    )
    return session.prompt


def _from_plain_terminal() -> str:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, adds editing and history to `input`
    message = input("> ")
    while message.endswith("\\"):
        message = message[:-1] + "\n" + input("  ")
    return message


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Returns the history of lines, kept on disk if possible."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state) / "wedlm-jax" / "chat-history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
        file.chmod(0o600)  # conversations are private
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


# --- commands -------------------------------------------------------------------------------


def follow(line: str, conversation: Conversation, llm: LLM) -> str:
    """Runs a command other than a plain /retry and returns its message.

    Raises:
      InputError: the command is unknown or cannot be run.
      EOFError: the command ends the chat.
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
        return "the system message is set" if given else "no system message"
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
            try:
                temperature = float(given)
            except ValueError:
                raise InputError(f"/temperature: expected a number, not {given!r}") from None
            conversation.params = dataclasses.replace(conversation.params, temperature=temperature)
        return f"temperature {conversation.params.temperature:g}"
    if given:
        conversation.window = _window(given, llm)
    window = llm.engine.window_size if conversation.window is None else conversation.window
    if window == 0 and not llm.engine.config.knows_masks:
        return f"window 0: {llm.name} was not trained on masks"
    return f"window {window}"


def _save(given: str, conversation: Conversation) -> str:
    if not given:
        raise InputError("/save: expected the name of a file")
    if not conversation.has_template:
        raise InputError("/save: without a chat template there is no conversation")
    path, messages = Path(given).expanduser(), conversation.messages
    if path.exists():
        raise InputError(f"/save: {path} already exists")
    with written_beside(path) as file:
        line = json.dumps({"messages": messages}, ensure_ascii=False)
        file.write(line.encode("utf-8", "replace") + b"\n")
    return f"{counted(len(messages), 'message')} in {path}"


def _window(given: str, llm: LLM) -> int | None:
    """Returns W of the next answers; None for the engine's."""
    if given == "auto" and (llm.engine.window_size == "auto" or not llm.engine.config.knows_masks):
        return None
    if given == "auto":
        raise InputError("/window: auto needs a chat that was started with --window-size auto")
    if not given.isdecimal():
        raise InputError(f"/window: expected a number, not {given!r}")
    try:
        llm.engine.check_window(int(given))
    except InputError as error:
        raise InputError(f"/window: {str(error).removeprefix('window_size: ')}") from None
    return int(given)
