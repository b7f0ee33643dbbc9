"""The parser of every command."""

from __future__ import annotations

import argparse
import difflib
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parses as argparse does, and says beside an unknown option which known one is nearest."""

    def error(self, message: str) -> NoReturn:
        """Ends the command with its usage and one sentence, and with status 2."""
        words = message.partition("unrecognized arguments: ")[2].split()
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        known = self._option_string_actions
        near = [name for one in options for name in difflib.get_close_matches(one, known, n=1)]
        hint = f"; did you mean {' and '.join(near)}?" if near else ""
        super().error(message + hint)
