"""Where messages come from: a person at a terminal, or a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

EDITED_KEYS = "Enter sends, Alt-Enter begins a line; what is pasted may have several."
PLAIN_KEYS = "Enter sends; a line that ends in a backslash goes on in the next."
PLAIN = "plain lines, as prompt_toolkit is not installed: pip install 'wedlm-jax[chat]'"


def keys() -> str:
    """Returns what keys do: with prompt_toolkit, or where lines are plain."""
    known = sys.modules.get("prompt_toolkit") is not None
    return f"{EDITED_KEYS if known else PLAIN_KEYS} Ctrl-C stops an answer."


def line_reader(stdin: TextIO) -> Callable[[], str]:
    """Returns a function that returns the next message.

    It raises EOFError after the last one, and at a terminal KeyboardInterrupt where a line was
    given up.
    """
    if stdin.isatty() and sys.stdout.isatty():
        return _from_terminal()
    return lambda: _from_pipe(stdin)


def _from_pipe(stdin: TextIO) -> str:
    """Returns a line; one that ends in a backslash goes on in the next."""
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
    """Returns a line, as `_from_pipe` does. Python's readline, where it is there, edits it and
    knows the lines before."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
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
    """Returns earlier lines, kept on disk if that can be."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(state) / "wedlm-jax" / "chat-history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
        file.chmod(0o600)  # what somebody told a model is nobody else's business
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
