"""Overrides of a recipe: ``key=value``, and ``+key=value`` for one more entry of a mapping."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from wedlm_jax.errors import InputError


class Origins:
    """The source of each field's value.

    Args:
      path: path of the recipe.
      overrides: overrides of its fields; the last one counts.
    """

    def __init__(self, path: str | Path, overrides: Sequence[str]):
        self._path, self._overrides = path, list(overrides)

    def of(self, *names: str) -> str:
        """Returns the override that has given the first of these fields that has one, or has given
        what the field is a part of, or a part of it; else the recipe."""
        for name in names:
            for item in reversed(self._overrides):
                key = item.partition("=")[0].removeprefix("+")
                if name == key or _is_in(name, key) or _is_in(key, name):
                    return f"override {item!r}"
        return str(self._path)


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
