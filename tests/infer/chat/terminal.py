"""A Python program at a pseudo-terminal, and somebody in front of it."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time


class Terminal:
    """A program at a terminal of its own.

    Args:
      arguments: of Python.
      state: where the program may keep things.
    """

    def __init__(self, arguments, state):
        self._own, other = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(other)
        self._seen = ""

    def type(self, text):
        os.write(self._own, text.encode())

    def say(self, text, answer):
        """Types a text at the prompt, and waits for the answer."""
        self.wait_for(">")
        self.type(text)
        self.wait_for(answer)

    def press_ctrl_c(self):
        """Sends what the terminal driver sends, while the program does not read keys itself."""
        self._process.send_signal(signal.SIGINT)

    def wait_for(self, pattern, seconds=60):
        """Reads until the pattern has come; returns what came up to its end.

        Raises:
          TimeoutError: it has not come in time.
        """
        until = time.monotonic() + seconds
        while True:
            if found := re.search(pattern, self._seen):
                before, self._seen = self._seen[: found.end()], self._seen[found.end() :]
                return before
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._own], [], [], left)[0]:
                raise TimeoutError(f"no {pattern!r} in {self._seen!r}")
            try:
                self._seen += os.read(self._own, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {pattern!r}: {self._seen!r}") from None

    def end(self):
        """Waits until the program ends; returns its status."""
        return self._process.wait(60)

    def close(self):
        """Ends the program, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._own)
