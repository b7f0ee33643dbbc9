"""A field of a recipe: its default, what it means, and what may be given for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from wedlm_jax.errors import InputError, written


def field(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float = math.inf,
    above: float | None = None,
    below: float = math.inf,
) -> Any:
    """Declares a field of a recipe: its default, what ``--help`` says of it, and its bounds.

    Args:
      choices: the texts that it may be; any where there are none.
      least, most: bounds of a number, which it may reach.
      above, below: bounds that it may not reach.
    """
    metadata = {
        "help": meaning,
        "choices": choices,
        "least": least,
        "most": most,
        "above": above,
        "below": below,
    }
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(section: Any, origin: Callable[[str], str], prefix: str = "") -> None:
    """Compares every value with what its field says that it may be.

    Args:
      origin: says where a field's value comes from, by the field's name.
    """
    for own in dataclasses.fields(section):
        name, value, said = prefix + own.name, getattr(section, own.name), own.metadata
        if dataclasses.is_dataclass(value):
            check_fields(value, origin, f"{name}.")
            continue
        for number, one in enumerate(value if isinstance(value, list) else []):
            if dataclasses.is_dataclass(one):
                check_fields(one, origin, f"{name}[{number}].")
        for one in value if isinstance(value, list) else [value]:
            if said["choices"] and one not in said["choices"]:
                expected = _one_of(said["choices"])
                raise InputError(f"{origin(name)}: {name} must be {expected}, not {one!r}")
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            shown = f"{name}: the share of {key}" if key else name
            if bound := _broken_bound(said, number):
                given = origin(f"{name}.{key}" if key else name)
                raise InputError(f"{given}: {shown} must be {bound}, not {number}")


def _broken_bound(said: Mapping[str, Any], number: Any) -> str | None:
    """Returns what a field says that a number must be, where it is not; None where it is."""
    if number is None:  # of a field that may be left out
        return None
    if said["above"] is not None:
        return None if said["above"] < number < math.inf else f"above {written(said['above'])}"
    if said["least"] is None:
        return None
    if said["least"] <= number <= said["most"] and number < said["below"]:
        return None
    if said["most"] < math.inf:
        return f"{written(said['least'])} to {written(said['most'])}"
    above = f"at least {written(said['least'])}"
    return above if said["below"] == math.inf else f"{above} and below {written(said['below'])}"


def _one_of(choices: tuple[str, ...]) -> str:
    return " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
