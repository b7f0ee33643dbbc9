"""Declares and checks fields of a recipe, and applies overrides: ``key=value``, and ``+key=value``
to add an entry to a mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from wedlm_jax.errors import InputError, errors_at
from wedlm_jax.option_values import Option


def field(default: Any, meaning: str, **limits: Any) -> Any:
    """Declares a field of a recipe: its default, its text in ``--help``, and its limits.

    Args:
      limits: arguments of `Option`; for a list or a mapping they apply to each value in it.
    """
    metadata = {"option": Option(meaning, **limits)}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(section: Any, origin: Callable[[str], str], prefix: str = "") -> None:
    """Checks every value against the limits of its field; OmegaConf has checked the types.

    Args:
      origin: returns where a field's value comes from, given the field's name.
    """
    for one_field in dataclasses.fields(section):
        name, value = prefix + one_field.name, getattr(section, one_field.name)
        if dataclasses.is_dataclass(value):
            check_fields(value, origin, f"{name}.")
            continue
        for shown, one in _values_in(name, value):
            if dataclasses.is_dataclass(one):
                check_fields(one, origin, f"{shown}.")
            elif one is not None:  # None leaves a field out
                with errors_at(origin(shown)):
                    one_field.metadata["option"].check(shown, one)


def _values_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values of a field, each with its name."""
    if isinstance(value, dict):
        yield from ((f"{name}.{key}", one) for key, one in value.items())
    elif isinstance(value, list):
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    else:
        yield name, value


def field_origin(path: str | Path, overrides: Sequence[str], *names: str) -> str:
    """Returns where the values of these fields come from: the last override of the first field that
    has one, counting overrides of its section and of its entries; else the path of the recipe."""
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
    """Applies the override ``item`` to an OmegaConf configuration.

    Raises:
      InputError: its value is not YAML, or the field does not allow +, or requires it.
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
    """Parses an override's value; leaves references to other fields (``${seed}``) unresolved."""
    try:
        given = OmegaConf.from_dotlist([f"value={text}"])
    except Exception as error:
        # A YAML parser has many error types.
        reason = str(error).splitlines()[0]
        raise InputError(f"override {item!r}: not valid YAML ({reason})") from None
    parsed = OmegaConf.to_container(given, resolve=False)
    assert isinstance(parsed, dict)
    return parsed["value"]


def _as_pair(key: Any, value: Any) -> tuple[Any, Any]:
    """Splits a key such as ``a:1``, which is how YAML reads ``{a:1}``, written without a space."""
    name, colon, number = str(key).rpartition(":")
    if value is None and colon:
        return name, _parsed(number, f"{key}")
    return key, value
