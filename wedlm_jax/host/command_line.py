"""Parses the options of every command, and ends each with its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from wedlm_jax.errors import FAULT, PIPE_CLOSED, exit_status, nearest

NUMBERS = {int: "a whole number", float: "a number"}
"""What an option of a Python type expects, in words."""


def run_command(name: str, main: Callable[[], int | None]) -> int:
    """Runs a command; returns its exit status, one of `wedlm_jax.errors.EXIT_STATUS`. A message
    begins with its name, as the user typed it: "wedlm train"."""
    try:
        return int(main() or 0)
    except (Exception, KeyboardInterrupt) as error:
        status = exit_status(error)
        if status == FAULT:
            raise
        message = str(error)
        if status == PIPE_CLOSED:
            sys.stderr.close()
            return status
        if isinstance(error, KeyboardInterrupt):
            message = message or "interrupted"
        elif isinstance(error, OSError):
            where = f"{error.filename}: " if error.filename else ""
            message = f"{where}{error.strerror or error}"
        print(f"{name}: {message}", file=sys.stderr)
        return status


class CommandParser(argparse.ArgumentParser):
    """Parses like argparse, but takes no abbreviations, keeps the lines of help texts, and refuses
    with one sentence, which suggests the nearest option or choice for an unknown one."""

    def __init__(self, **options: Any):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def error(self, message: str) -> NoReturn:
        """Ends the command with one sentence and where to read more, and with status 2."""
        words = message.partition("unrecognized arguments: ")[2].split()
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        known = self._option_string_actions
        near = [name for one in options if (name := nearest(one, known)) is not None]
        hint = f"; did you mean {' and '.join(near)}?" if near else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n`{self.prog} --help` lists the options\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if action.type in NUMBERS:  # argparse says "invalid float value"
                error.message = f"expected {NUMBERS[action.type]}, not {arg_string!r}"
            raise

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if near := nearest(str(value), map(str, action.choices or ())):
                error.message += f"; did you mean {near!r}?"
            raise


def at_least_1(text: str) -> int:
    """Reads a count for argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, not {text!r}")
    return int(text)
