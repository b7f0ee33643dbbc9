"""Runs a program that a model wrote in a process of its own, with little that it can reach.

The process has a new interpreter, an empty folder, no environment, no network and no other
processes to see where Linux allows it, and bounds on time, memory and files. That keeps accidents
small. It is no wall against an attacker: whoever does not trust the model runs this in a
container.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT = 5.0
"""Seconds for a program."""
GRACE = 5.0
"""Seconds more for the interpreter to begin and to end."""

RESULT = "result"
LONGEST_RESULT = 500

APART = ("unshare", "--user", "--map-current-user", "--net", "--ipc", "--pid", "--kill-child")
"""Runs a command without network, and without other processes, which end with it."""

logger = logging.getLogger(__name__)


def run_program(problem: Mapping[str, Any], completion: str, *, timeout: float = TIMEOUT) -> str:
    """Runs the tests of a problem of HumanEval on a completion of it.

    Args:
      problem: with ``prompt``, ``test`` and ``entry_point``.
      completion: what follows the prompt.
      timeout: seconds that the program may take.

    Returns:
      "passed", "timed out", or "failed: " and why.
    """
    given = {name: problem[name] for name in ("prompt", "test", "entry_point")}
    order = json.dumps({"problem": given, "completion": completion, "timeout": timeout})
    with tempfile.TemporaryDirectory(prefix="wedlm-program-") as folder:
        process = subprocess.Popen(
            [*_apart(), sys.executable, "-I", str(Path(__file__).with_name("program.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"TMPDIR": folder, "HOME": folder, "PATH": os.defpath},
            start_new_session=True,
        )
        try:
            process.communicate(order.encode("utf-8"), timeout=timeout + GRACE)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _end(process)
        try:
            with open(Path(folder) / RESULT, encoding="utf-8", errors="replace") as file:
                return file.read(LONGEST_RESULT) or f"failed: ended with {process.returncode}"
        except OSError:
            return f"failed: ended with {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it began in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def _apart() -> tuple[str, ...]:
    try:
        allowed = subprocess.run([*APART, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        allowed = False
    if allowed:
        return APART
    logger.warning(
        "this system allows no namespaces (`%s true` fails): programs are run with network",
        " ".join(APART),
    )
    return ()
