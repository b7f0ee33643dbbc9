"""Handles SIGTERM: a job that is asked to stop finishes running sequences, then says how to
resume."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from wedlm_jax.errors import TERMINATED
from wedlm_jax.host.signals import StopRequest

GRACE_SECONDS = 20.0
"""Kubernetes sends SIGKILL 30 seconds after SIGTERM."""


class JobStopped(BaseException):
    """The job stops on request. As for Ctrl-C, not an `Exception`: error handlers let it pass."""


class GracefulStop(StopRequest):
    """Notes SIGTERM, and gives running sequences time to finish.

    Outside of `finishing` there is nothing to finish, and the job stops at once, by `JobStopped`.
    Inside, no new prompts are started, and running ones have ``grace`` seconds. A second SIGTERM
    ends the process immediately.

    Args:
      grace: seconds.
    """

    def __init__(self, grace: float = GRACE_SECONDS):
        super().__init__()
        self._grace, self._deadline, self._finishing = grace, 0.0, False

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Marks a block that has something to finish, and that checks ``requested`` and `check`."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def check(self) -> None:
        """Raises `JobStopped` once the grace period is over; to be called regularly."""
        if self.requested and time.monotonic() >= self._deadline:
            raise JobStopped

    def note(self) -> None:
        """Notes that SIGTERM has arrived."""
        if self.requested:
            os._exit(TERMINATED)
        self.requested, self._deadline = True, time.monotonic() + self._grace
        if not self._finishing:
            raise JobStopped
