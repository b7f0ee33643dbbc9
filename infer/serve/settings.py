"""Settings of `wedlm serve`: flags override environment variables, which override a file."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from wedlm_jax.errors import InputError, did_you_mean

FILE = "wedlm.toml"
TABLE = "serve"
PREFIX = "WEDLM_"

TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def layered(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Merges flags, environment and file.

    Args:
      parser: parser of the flags, which leaves out what is not given. ``--config`` names the file.
      arguments: arguments of the command line.
      environment: where ``WEDLM_PORT`` is ``--port``.

    Raises:
      InputError: naming the variable, or the file and its key.
    """
    flags = vars(parser.parse_args(arguments))
    actions = {
        action.dest: action for action in parser._actions if action.dest not in ("help", "config")
    }
    given = flags.pop("config", environment.get(f"{PREFIX}CONFIG"))
    path = Path(given or FILE)
    if given is None and not path.exists():
        return _from_environment(environment, actions) | flags
    return _from_file(path, actions) | _from_environment(environment, actions) | flags


def _from_file(path: Path, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as TOML ({error})") from None
    table = tables.get(TABLE, {})
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected [{TABLE}] to be a table")
    settings = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in actions:
            raise InputError(f"{path}: unknown key {key!r}; {did_you_mean(name, actions)}")
        if isinstance(value, dict) and actions[name].nargs == "+":
            value = [f"{one}={other}" for one, other in value.items()]
        elif isinstance(value, dict):
            value = json.dumps(value)
        settings[name] = _read(f"{path}: {key}", actions[name], value)
    return settings


def _from_environment(
    environment: Mapping[str, str], actions: Mapping[str, argparse.Action]
) -> dict[str, Any]:
    settings = {}
    for variable, text in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name == "config":
            continue
        if name not in actions:
            hint = did_you_mean(name, actions)
            print(
                f"wedlm serve: {variable} is ignored, as no setting is called so; {hint}",
                file=sys.stderr,
            )
            continue
        value = shlex.split(text) if actions[name].nargs == "+" else text
        settings[name] = _read(variable, actions[name], value)
    return settings


def _read(origin: str, action: argparse.Action, value: Any) -> Any:
    """Parses a value as its flag would."""
    if action.nargs == 0:
        truth = TRUTHS.get(str(value).lower())
        if truth is None:
            raise InputError(f"{origin}: expected true or false, not {value!r}")
        return truth
    values = value if isinstance(value, list) else [value]
    if len(values) != 1 and action.nargs is None:
        raise InputError(f"{origin}: expected one value, not {value!r}")
    reader = _Reader(origin)
    kwargs: dict[str, Any] = {"nargs": action.nargs, "type": action.type, "choices": action.choices}
    reader.add_argument("value", **{k: v for k, v in kwargs.items() if v is not None})
    return reader.parse_args(["--", *map(str, values)]).value


class _Reader(argparse.ArgumentParser):
    """Parses one value; an error names where the value came from."""

    def __init__(self, origin: str):
        super().__init__(add_help=False)
        self._origin = origin

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self._origin}: {message.removeprefix('argument value: ')}")
