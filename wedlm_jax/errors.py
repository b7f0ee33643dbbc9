"""The one error type for bad input, and hints for what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the caller gave is unusable.

    Its message is one sentence that names the file, field or row and what was
    expected. The command line prints it and exits with status 2.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the nearest known one, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
