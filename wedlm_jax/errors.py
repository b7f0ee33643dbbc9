"""The error types of the command line, and what their messages are made of."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable


class InputError(ValueError):
    """The caller's input cannot be used.

    Its message is one sentence that names the file, field or record and what was
    expected. The command line prints it and exits with status 2.
    """


class StorageFailure(Exception):
    """Storage refuses, or does not answer: a network, permissions, a full disk.

    Nothing is wrong with what lies there, nor with the input, and the same call may succeed later.
    Its message is one sentence that names the file and says what the storage said. The command
    line prints it and exits with status `STORAGE_FAILED`.
    """


STORAGE_FAILED = 74
"""Exit status after `StorageFailure`: EX_IOERR of sysexits.h."""


def exit_status(error: BaseException) -> int:
    """Returns the status with which a command that ends by an error exits."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, StorageFailure):
        return STORAGE_FAILED
    return 2 if isinstance(error, InputError) else 1


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the nearest known one, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def require_extra(what: str, extra: str, *packages: str) -> None:
    """Refuses to begin what needs packages that are not installed.

    Args:
      what: needs them; begins the sentence.
      extra: of this package, which brings them.
      packages: the names under which they are imported.

    Raises:
      InputError: naming the missing ones, and the command that installs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{what} needs {' and '.join(missing)}, which {are} not installed: "
            f'pip install "wedlm-jax[{extra}]"'
        )


def shortened(text: str, length: int = 200) -> str:
    """Returns a text as part of a message: on one line, and cut to ``length`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def counted(number: int, what: str) -> str:
    """Returns a number with its noun: "1 record", "1,200 records"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
