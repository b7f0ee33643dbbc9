"""A field of a recipe: its default, what it means and what may be given for it; and overrides of
fields, ``key=value``, and ``+key=value`` for one more entry of a mapping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

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
    for one_field in dataclasses.fields(section):
        name, limits = prefix + one_field.name, one_field.metadata
        value = getattr(section, one_field.name)
        if dataclasses.is_dataclass(value):
            check_fields(value, origin, f"{name}.")
            continue
        for number, one in enumerate(value if isinstance(value, list) else []):
            if dataclasses.is_dataclass(one):
                check_fields(one, origin, f"{name}[{number}].")
        for one in value if isinstance(value, list) else [value]:
            if limits["choices"] and one not in limits["choices"]:
                expected = _one_of(limits["choices"])
                raise InputError(f"{origin(name)}: {name} must be {expected}, not {one!r}")
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            shown = f"{name}: the share of {key}" if key else name
            if bound := _broken_bound(limits, number):
                given = origin(f"{name}.{key}" if key else name)
                raise InputError(f"{given}: {shown} must be {bound}, not {number}")


def _broken_bound(limits: Mapping[str, Any], number: Any) -> str | None:
    """Returns what a field says that a number must be, where it is not; None where it is."""
    if number is None:  # of a field that may be left out
        return None
    if limits["above"] is not None:
        return None if limits["above"] < number < math.inf else f"above {written(limits['above'])}"
    if limits["least"] is None:
        return None
    if limits["least"] <= number <= limits["most"] and number < limits["below"]:
        return None
    if limits["most"] < math.inf:
        return f"{written(limits['least'])} to {written(limits['most'])}"
    above = f"at least {written(limits['least'])}"
    return above if limits["below"] == math.inf else f"{above} and below {written(limits['below'])}"


def _one_of(choices: tuple[str, ...]) -> str:
    return " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"


def field_origin(path: str | Path, overrides: Sequence[str], *names: str) -> str:
    """Returns the source of fields' values: the last override of the first of these fields that has
    one, or of what the field is a part of, or of a part of it; else the path of the recipe."""
    for name in names:
        for item in reversed(overrides):
            key = item.partition("=")[0].removeprefix("+")
            if name == key or _is_in(name, key) or _is_in(key, name):
                return f"override {item!r}"
    return str(path)


def _is_in(name: str, whole: str) -> bool:
    """Returns whether a field is a part of another: ``data.weights.prose`` of ``data.weights``."""
    return name.startswith((f"{whole}.", f"{whole}["))


def apply_override(config: Any, item: str) -> None:
    """Changes a configuration of OmegaConf as ``item`` says.

    Raises:
      InputError: its value is not YAML, or + and the field do not go together.
    """
    key, _, text = item.partition("=")
    path = key.removeprefix("+")
    value = _parsed(text, item)
    if isinstance(value, dict):
        value = {name: given for pair in value.items() for name, given in [_as_pair(*pair)]}
    there = OmegaConf.select(config, path)
    adds, is_mapping = path != key, _is_mapping(there)
    inside = _is_mapping(OmegaConf.select(config, path.rpartition(".")[0])) and not is_mapping
    if adds and not is_mapping and not inside:
        raise InputError(f"override {item!r}: + adds to a mapping, such as data.sources")
    if inside and there is None and not adds:
        raise InputError(f"override {item!r}: there is no such entry; +{item} adds it")
    OmegaConf.update(config, path, value, merge=adds or not is_mapping)


def _is_mapping(node: Any) -> bool:
    """Returns whether a node of the configuration has keys that the user chooses."""
    return OmegaConf.is_dict(node) and OmegaConf.get_type(node) is dict


def _parsed(text: str, item: str) -> Any:
    """Parses an override's value, references to other fields (``${seed}``) unresolved."""
    try:
        given = OmegaConf.from_dotlist([f"value={text}"])
    except Exception as error:
        # A YAML parser has many error types of its own.
        reason = str(error).splitlines()[0]
        raise InputError(f"override {item!r}: not valid YAML ({reason})") from None
    parsed = OmegaConf.to_container(given, resolve=False)
    assert isinstance(parsed, dict)
    return parsed["value"]


def _as_pair(key: Any, value: Any) -> tuple[Any, Any]:
    """Splits a key such as ``a:1``, for which YAML takes ``{a:1}`` without a space."""
    name, colon, number = str(key).rpartition(":")
    if value is None and colon:
        return name, _parsed(number, f"{key}")
    return key, value
