"""The parser of every command."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parses as argparse does, but takes no abbreviations, keeps the lines of help texts, and says
    beside an unknown option which known one is nearest."""

    def __init__(self, **options: Any):
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options
        )

    def error(self, message: str) -> NoReturn:
        """Ends the command with its usage and one sentence, and with status 2."""
        words = message.partition("unrecognized arguments: ")[2].split()
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        known = self._option_string_actions
        near = [name for one in options for name in difflib.get_close_matches(one, known, 1, 0.7)]
        hint = f"; did you mean {' and '.join(near)}?" if near else ""
        super().error(message + hint)
