"""SIGTERM: a job that is asked to end finishes what is cheap, and says how to go on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from wedlm_jax.signals import TERMINATED, StopRequest

GRACE_SECONDS = 20.0
"""Kubernetes sends SIGKILL 30 seconds after SIGTERM."""


class JobStopped(BaseException):
    """The job ends on request. As with Ctrl-C, what handles errors lets it pass."""


class GracefulStop(StopRequest):
    """Notes SIGTERM, and gives what is under way time to finish.

    Outside of `finishing` there is nothing to finish, and the job ends where it stands, by
    `JobStopped`. Inside no new rows are begun, and those under way may take ``grace`` seconds.
    A second SIGTERM ends the process at once.

    Args:
      grace: seconds.
    """

    def __init__(self, grace: float = GRACE_SECONDS):
        super().__init__()
        self._grace, self._deadline, self._finishing = grace, 0.0, False

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """A block that has something to finish: it has to ask for ``requested`` and `check`."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def check(self) -> None:
        """Raises `JobStopped` if the time of grace is over. To be called now and then."""
        if self.requested and time.monotonic() >= self._deadline:
            raise JobStopped

    def note(self) -> None:
        """Takes in that SIGTERM has come."""
        if self.requested:
            os._exit(TERMINATED)
        self.requested, self._deadline = True, time.monotonic() + self._grace
        if not self._finishing:
            raise JobStopped
