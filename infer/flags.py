"""Command-line options: a flag for each field of `SamplingParams` and `EngineConfig`, built from
the field's own description."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.engine.config import ENGINE_OPTIONS, EngineConfig
from wedlm_jax.errors import InputError, require_extra, shortened
from wedlm_jax.option_values import Option, as_schema
from wedlm_jax.params import OPTIONS, SamplingParams

NOT_FLAGS = ("logit_bias",)
"""Fields without a flag, as they hold a JSON object; records of a file may set them."""

ENGINE_FLAGS = tuple(
    name
    for name in ENGINE_OPTIONS
    if name not in ("lookup", "page_size", "num_pages", "chunk_tokens")
)
"""Fields of `EngineConfig` that have a flag."""
SHARED = ("drafter", "dtype", "quantization", "kv_cache_dtype", "deterministic", "backup_masks")
"""Those of `ENGINE_FLAGS` that all engines of a benchmark share."""
FLAG_NAMES = {"max_batch_size": "batch_size"}
"""Fields whose flag has another name."""
LLM_OPTIONS = {FLAG_NAMES.get(name, name): name for name in ("model", *ENGINE_OPTIONS)}
"""Names of parsed options, and the arguments of `LLM` that they hold."""


def flag(name: str) -> str:
    """Returns the flag of a field."""
    return f"--{name.replace('_', '-')}"


def adders(group: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns two functions that add options to a group of argparse. Further arguments are
    argparse's.

    The first takes a name, a metavar (None for choices) and a help text, and adds an option with a
    value: an integer for the metavar N, a float for X, otherwise a text. The second takes a name
    and a help text, and adds a switch.
    """

    def add(name: str, metavar: str | None, help_text: str, **more: Any) -> None:
        kind = {"N": int, "X": float}.get(metavar or "", str)
        group.add_argument(name, metavar=metavar, type=kind, help=help_text, **more)

    def switch(name: str, help_text: str, **more: Any) -> None:
        group.add_argument(name, action="store_true", help=help_text, **more)

    return add, switch


def add_decoding_options(group: Any, instead: Mapping[str, str] | None = None) -> None:
    """Adds ``--window-size`` and a flag for each field of `SamplingParams`. A flag that is not
    given is absent from the parsed options.

    Args:
      instead: help texts that replace those of sampling fields, by name.
    """
    _add_engine_flag(group, "window_size", None)
    # The mode changes most, so it comes first.
    for name in ["mode", *(name for name in OPTIONS if name not in ("mode", *NOT_FLAGS))]:
        option, default = OPTIONS[name], getattr(SamplingParams, name)
        none = f"; none: {option.none}" if option.none and not isinstance(default, tuple) else ""
        help_text = (instead or {}).get(name, f"{option.help}{none} [{_default(default)}]")
        if name == "json_schema":
            read, metavar = _schema_in, "FILE|JSON"
            group.add_argument(flag(name), type=read, metavar=metavar, help=help_text)
        else:
            add_flag(group, flag(name), option, default, help_text)


def add_engine_options(
    group: Any, *, batch_size: str = "16", names: Sequence[str] = ("model", *ENGINE_FLAGS)
) -> None:
    """Adds the flags of the model and its engine, except the window's.

    Args:
      batch_size: the default of ``--batch-size``, for the help.
      names: the fields that get a flag.
    """
    shown = "folder in Hugging Face format, hub id, or smollm2 [the included model]"
    for name in names:
        if name == "model":
            group.add_argument("--model", metavar="DIR", help=shown)
        elif name != "window_size":
            _add_engine_flag(group, name, batch_size if name == "max_batch_size" else None)


def _add_engine_flag(group: Any, name: str, default: str | None) -> None:
    option = ENGINE_OPTIONS[name]
    value = getattr(EngineConfig, name)
    default = default or option.none or _default(value)
    shown = flag(FLAG_NAMES.get(name, name))
    help_text = f"{option.help} [{default}]"
    if name == "mesh":
        group.add_argument(
            shown,
            type=_mesh_axis,
            nargs="+",
            action="extend",
            metavar="NAME=N",
            help=help_text,
        )
    elif name == "chat_template_kwargs":
        group.add_argument(shown, type=_object, metavar="JSON", help=help_text)
    else:
        # The flag does not take "none": leaving it out means None.
        add_flag(group, shown, dataclasses.replace(option, none=None), value, help_text)


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `LLM` among the parsed ``options``, under its names."""
    given = {name: options[one] for one, name in LLM_OPTIONS.items() if one in options}
    if "mesh" in given:
        given["mesh"] = dict(given["mesh"])
    return given


def add_flag(group: Any, name: str, option: Option, default: Any, help_text: str) -> None:
    """Adds the flag of a field that holds a boolean, a choice, a text, a number, or several."""
    help_text = help_text.replace("%", "%%")
    if option.flag:
        # A flag that is on by default also has --no-NAME.
        action = argparse.BooleanOptionalAction if default else "store_true"
        group.add_argument(name, action=action, help=help_text)
    elif option.choices:
        group.add_argument(name, choices=option.choices, help=help_text)
    elif option.text:
        group.add_argument(name, metavar=option.text, help=help_text)
    elif isinstance(default, tuple):
        kind, metavar = (int, "N") if name.endswith("-ids") else (str, "S")
        group.add_argument(
            name, nargs="+", action="extend", type=kind, metavar=metavar, help=help_text
        )
    else:
        number, metavar = (int, "N") if option.integer else (float, "X")
        texts = [*option.also, *(["none"] if option.none else [])]
        read = _number_or(number, texts) if texts else number
        group.add_argument(name, type=read, metavar="|".join([metavar, *texts]), help=help_text)


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters among the parsed ``options``. If ``generation_config`` is
    "auto", those not given come from the model's `generation_config.json`."""
    base = advised_params(options)
    with errors_at_flags():
        given = {name: options[name] for name in OPTIONS if name in options}
        params = dataclasses.replace(base, **given)
        if params.grammar is not None:
            # Before a model is loaded.
            require_extra(flag(params.grammar[0]), "grammar", "llguidance")
        return params


def advised_params(options: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters that the model advises, if the parsed ``options`` ask for
    them; otherwise the defaults."""
    if options.get("generation_config") != "auto":
        return SamplingParams()
    from wedlm_jax.checkpoint.hf import read_generation_config
    from wedlm_jax.checkpoint.open import find_model, tokenizer_folder

    return read_generation_config(tokenizer_folder(find_model(options.get("model")))).params()


@contextlib.contextmanager
def errors_at_flags() -> Iterator[None]:
    """Names the flag in the message of an `InputError` that begins with a field."""
    try:
        yield
    except InputError as error:
        name, colon, rest = str(error).partition(":")
        if name not in (*OPTIONS, *ENGINE_FLAGS):
            raise
        raise InputError(f"{flag(FLAG_NAMES.get(name, name))}{colon}{rest}") from None


def _default(value: Any) -> str:
    if value is False:
        return "off"
    return "none" if value == () or value is None else str(value)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


_object.__name__ = "JSON object"  # what argparse calls it in its message


def _mesh_axis(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    return name, int(size)


_mesh_axis.__name__ = "NAME=N"


def _schema_in(given: str) -> str:
    """Returns the JSON schema that a flag gives as text or as a file name."""
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


def _number_or(kind: type, texts: Sequence[str]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text.lower() == "none" and "none" in texts:
            return None
        return text if text in texts else kind(text)

    read.__name__ = " or ".join(["number", *map(repr, texts)])  # for argparse's message
    return read
