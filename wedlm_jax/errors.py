"""The error types of the command line, and what their messages are made of."""

from __future__ import annotations

import difflib
import errno
import importlib.util
from collections.abc import Iterable


class InputError(ValueError):
    """The caller's input cannot be used.

    Its message is one sentence that names the file, field or record and what was
    expected. The command line prints it and exits with status 2.
    """


class BadData(InputError):
    """Too much of what the input holds cannot be used. The command line exits with `BAD_DATA`."""


class StorageFailure(Exception):
    """Storage refuses, or does not answer: a network, permissions, a full disk.

    Nothing is wrong with what lies there, nor with the input, and the same call may succeed later.
    Its message is one sentence that names the file and says what the storage said. The command
    line prints it and exits with status `STORAGE_FAILED`.
    """


FAULT = 1
"""Exit status after any other exception."""
BAD_INPUT = 2
"""Exit status after `InputError`, and after options that cannot be parsed."""
BAD_DATA = 65
"""Exit status after `BadData`, and of a job without a single good record: EX_DATAERR of
sysexits.h."""
STORAGE_FAILED = 74
"""Exit status after `StorageFailure`: EX_IOERR of sysexits.h."""
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143
"""Exit status after SIGINT, SIGPIPE and SIGTERM: 128 and the signal's number. None is 0, so a
script that waits for the command does not go on without its result."""

EXIT_STATUS = {
    0: "done; a server was asked to end, and has given its answers",
    FAULT: "a fault of the program, with a traceback",
    BAD_INPUT: "options, input or files that cannot be used, in one sentence; "
    "the same command would end so again",
    BAD_DATA: "a job's records are bad: all of them, the first 1,000, or more than --max-errors; "
    "what was decoded is kept",
    STORAGE_FAILED: "storage or a network that refuses or does not answer, such as a full disk, in "
    "one sentence; the same command may succeed later, and goes on from what is kept",
    INTERRUPTED: "Ctrl-C (SIGINT); the same command goes on from what is kept",
    PIPE_CLOSED: "whoever read the output has gone (SIGPIPE)",
    TERMINATED: "SIGTERM, as before a preemption; the same command goes on from what is kept",
}
"""What the status of every `wedlm` command means: the one table, which docs/reference.md prints.
A restart loop goes on after all but 0, `BAD_INPUT` and `BAD_DATA`, and those that somebody asked
for."""

CALLER_ERRORS = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
    }
)
"""What a file system says of a name or a permission that is wrong. All else it says (ENOSPC,
EDQUOT, EIO, ESTALE, ETIMEDOUT, ...) is of its own state, which passes."""


def is_passing(error: OSError) -> bool:
    """Tells whether the same call may succeed later: a full disk, as against a wrong name."""
    return error.errno is not None and error.errno not in CALLER_ERRORS


def file_error(path: object, what: str, error: OSError) -> InputError | StorageFailure:
    """Returns the error to raise for a file system's refusal.

    Args:
      path: of the file or folder.
      what: was refused: "cannot be written".
      error: of the file system.

    Returns:
      `StorageFailure` where the refusal may pass, else `InputError`.
    """
    kind = StorageFailure if is_passing(error) else InputError
    return kind(f"{path}: {what} ({error.strerror or shortened(str(error))})")


def exit_status(error: BaseException) -> int:
    """Returns the status, of `EXIT_STATUS`, with which a command that ends by an error exits."""
    if isinstance(error, InputError):
        return BAD_DATA if isinstance(error, BadData) else BAD_INPUT
    if isinstance(error, CompilingInterrupted):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return PIPE_CLOSED
    passing = isinstance(error, OSError) and is_passing(error)
    return STORAGE_FAILED if passing or isinstance(error, StorageFailure) else FAULT


class CompilingInterrupted(KeyboardInterrupt):
    """A signal has come while a program was being compiled: the command ends, because its compiler
    cannot be asked to stop.

    Attributes:
      status: with which the command exits.
    """

    def __init__(self, status: int = INTERRUPTED):
        super().__init__("interrupted while compiling")
        self.status = status


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the nearest known one, or all of them."""
    names = list(known)
    near = nearest(name, names)
    return f"did you mean {near!r}?" if near else f"there are {', '.join(names)}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Returns the known name that is most like ``name``; None if none is.

    Of two that are alike by their letters, the one whose words ``name`` has is nearer:
    "max_completion_tokens" is "max_tokens" rather than "min_tokens".

    Args:
      cutoff: how much of the letters must be the same, 0 to 1.
    """
    own = set(name.split("_"))

    def likeness(other: str) -> float:
        words = set(other.split("_"))
        return difflib.SequenceMatcher(None, other, name).ratio() + 0.1 * (
            len(words & own) / len(words)
        )

    near = difflib.get_close_matches(name, list(known), n=5, cutoff=cutoff)
    return max(near, key=likeness, default=None)


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
