"""Prints notices: sentences on standard error, apart from a command's results and its progress bar.

They go through the logger ``wedlm``, which has a handler of its own: the root logger gets one from
whichever library logs first (absl, when orbax is imported), and that one begins each line with a
level and a name. An application that gives ``wedlm`` a handler before the first notice has them
there instead; with a `logging.NullHandler`, in the root logger's.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

_LOGGER = logging.getLogger("wedlm")


def log(form: str | None = None) -> logging.Logger:
    """Returns the logger of notices, with a handler.

    Args:
      form: format of its lines from now on, as `logging.Formatter` takes it; a notice is its
        sentence alone until one is given.
    """
    if not _LOGGER.handlers:
        _LOGGER.addHandler(_StandardError())
        _LOGGER.propagate = False
    if form is not None:
        for handler in _LOGGER.handlers:
            handler.setFormatter(logging.Formatter(form))
    return _LOGGER


def notice(sentence: str, *values: object) -> None:
    """Logs something that a caller may not expect.

    Args:
      sentence: with a ``%s`` for each of ``values``.
    """
    log().warning(sentence, *values)


class _StandardError(logging.StreamHandler):
    """Writes to what standard error is when something is said: a bar puts itself there."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextlib.contextmanager
def through_bar(bar: AbstractContextManager[object]) -> Iterator[None]:
    """Opens a bar that puts itself in the place of standard output and error, and has libraries'
    messages, which go to the root logger's handlers, follow: what is written past it would stand
    in the middle of its line."""
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as undone, bar:
        # Entered before the bar, it is left after it: meanwhile a message goes on through the bar.
        for handler in logging.root.handlers:
            if not isinstance(handler, logging.StreamHandler):
                continue
            for old, now in zip(before, (sys.stdout, sys.stderr), strict=True):
                if handler.stream is old is not now:
                    undone.callback(handler.setStream, old)
                    handler.setStream(now)
        yield
