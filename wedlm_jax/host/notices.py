"""Prints notices: sentences on standard error, apart from a command's results and its progress bar.

They go through the logger ``wedlm``, which has its own handler: the root logger gets one from
whichever library logs first (absl, when orbax is imported), and that handler begins each line with
a level and a name. If an application gives ``wedlm`` a handler before the first notice, notices go
there instead; with a `logging.NullHandler`, they go to the root logger's handlers.
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
      form: format of its lines from now on, as for `logging.Formatter`; by default a line is the
        sentence alone.
    """
    if not _LOGGER.handlers:
        _LOGGER.addHandler(_StandardError())
        _LOGGER.propagate = False
    if form is not None:
        for handler in _LOGGER.handlers:
            handler.setFormatter(logging.Formatter(form))
    return _LOGGER


def notice(sentence: str, *values: object) -> None:
    """Logs something that a caller may not expect: a sentence with a ``%s`` for each value."""
    log().warning(sentence, *values)


class _StandardError(logging.StreamHandler):
    """Writes to the current standard error, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextlib.contextmanager
def through_bar(bar: AbstractContextManager[object]) -> Iterator[None]:
    """Opens a bar that replaces standard output and error, and redirects libraries' messages, which
    go to the root logger's handlers, to it: text written past the bar would appear in the middle of
    its line."""
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as undone, bar:
        # The stack is left after the bar, so messages go through the bar until it is gone.
        for handler in logging.root.handlers:
            if not isinstance(handler, logging.StreamHandler):
                continue
            for old, now in zip(before, (sys.stdout, sys.stderr), strict=True):
                if handler.stream is old is not now:
                    undone.callback(handler.setStream, old)
                    handler.setStream(now)
        yield
