"""Sampling parameters on a command line: a flag for each field of `SamplingParams`, from what it
says of itself."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wedlm_jax.errors import InputError, shortened
from wedlm_jax.option_values import Option, as_schema
from wedlm_jax.params import OPTIONS, SamplingParams

DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
NOT_FLAGS = ("logit_bias",)
"""Fields without a flag: on a command line they would be JSON. Rows of a file have them."""


def flag(name: str) -> str:
    """Returns the flag of a field."""
    return f"--{name.replace('_', '-')}"


def add_sampling_options(group: Any, instead: Mapping[str, str] | None = None) -> None:
    """Adds a flag for each field. Defaults are those of `SamplingParams`: a flag that is not given
    is absent from what is parsed.

    Args:
      instead: help of fields that a command takes otherwise, by name.
    """
    for name in ["mode", *(name for name in OPTIONS if name != "mode")]:  # what changes most first
        if name in NOT_FLAGS:
            continue
        option = OPTIONS[name]
        meaning = option.help
        if option.none and not isinstance(DEFAULTS[name], tuple):
            meaning += f"; none: {option.none}"
        help_text = f"{meaning} [{_default(name, option)}]"
        help_text = (instead or {}).get(name, help_text).replace("%", "%%")
        if option.flag:
            group.add_argument(flag(name), action="store_true", help=help_text)
        elif option.choices:
            group.add_argument(flag(name), choices=option.choices, help=help_text)
        elif option.text:
            of_file = name == "json_schema"
            group.add_argument(
                flag(name),
                type=_schema_in if of_file else str,
                metavar="FILE|JSON" if of_file else "S",
                help=help_text,
            )
        elif isinstance(DEFAULTS[name], tuple):
            of_ids = name.endswith("_ids")
            group.add_argument(
                flag(name),
                nargs="+",
                action="extend",
                type=int if of_ids else str,
                metavar="N" if of_ids else "S",
                help=help_text,
            )
        else:
            kind = int if option.integer else float
            read = _or_none(kind) if option.none else kind
            metavar = ("N" if option.integer else "X") + ("|none" if option.none else "")
            group.add_argument(flag(name), type=read, metavar=metavar, help=help_text)


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters among the parsed ``options``; what these leave out is as the
    model's `generation_config.json` advises, where ``generation_config`` says so.

    Raises:
      InputError: naming the flag, not the field.
    """
    base = advised_params(options)
    try:
        given = {name: options[name] for name in OPTIONS if name in options}
        return dataclasses.replace(base, **given)
    except InputError as error:
        raise InputError(as_flag(str(error))) from None


def advised_params(options: Mapping[str, Any]) -> SamplingParams:
    """Returns what the model among the parsed ``options`` advises, if they ask for it."""
    if options.get("generation_config") != "auto":
        return SamplingParams()
    from wedlm_jax.checkpoint.find_model import find_model
    from wedlm_jax.checkpoint.generation_config import read_generation_config

    return read_generation_config(find_model(options.get("model"))).params()


def as_flag(message: str, others: tuple[str, ...] = ()) -> str:
    """Returns a message that begins with a field, or with one of ``others``, with its flag
    instead."""
    name, colon, rest = message.partition(":")
    return f"{flag(name)}{colon}{rest}" if name in (*OPTIONS, *others) else message


def field_list(indent: str, width: int) -> str:
    """Returns the names of all fields, as lines of a help text."""
    return textwrap.fill(", ".join(OPTIONS), width, initial_indent=indent, subsequent_indent=indent)


def _default(name: str, option: Option) -> str:
    value = DEFAULTS[name]
    if option.flag:
        return "not"
    if value == () or value is None:
        return "none"
    return str(value)


def _schema_in(given: str) -> str:
    """Returns the text of a schema for argparse: that in a file, or what is given itself."""
    try:
        in_line = given.lstrip().startswith("{")
        text = given if in_line else Path(given).read_text(encoding="utf-8")
        as_schema(text)
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{given} cannot be read ({error})") from None
    except InputError as error:
        reason = str(error).partition(": ")[2]
        what = shortened(given, 60) if in_line else given
        raise argparse.ArgumentTypeError(f"{what}: {reason}") from None
    return text


def _or_none(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = "number or 'none'"  # what argparse calls it in its message
    return read
