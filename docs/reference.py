"""Writes docs/reference.md from the code: `python -m docs.reference`.

The texts come from `--help`, from the fields of `SamplingParams` and of recipes, and from
docstrings: change them there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

from train.recipe.config import TrainConfig
from wedlm_jax.__main__ import SUBCOMMANDS, subcommand
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.errors import EXIT_STATUS
from wedlm_jax.option_values import Option, options_of
from wedlm_jax.params import SamplingParams

PAGE = Path(__file__).with_name("reference.md")

MODULES = (
    "benchmarks.attention",
    "benchmarks.chunks",
    "benchmarks.floor",
    "benchmarks.gaps",
    "benchmarks.pods",
    "benchmarks.serve_load",
    "benchmarks.step",
    "examples.embedded",
    "examples.embedded.corpus",
    "examples.embedded.words",
)
"""What `python -m` runs in a checkout, in addition to the subcommands."""

CLASSES = {
    "wedlm_jax": ("LLM", "Completion", "Chunk"),
    "wedlm_jax.decode.logprobs": ("TokenLogprob",),
    "wedlm_jax.engine.engine": ("Engine",),
    "wedlm_jax.engine.interface": (
        "Request",
        "WindowForward",
        "TokenDelta",
        "Finished",
        "Failed",
        "Traced",
    ),
}
FUNCTIONS = {
    "wedlm_jax.checkpoint.model": ("load_checkpoint", "save_checkpoint"),
    "wedlm_jax.sharding": ("make_mesh",),
}
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")

HEAD = """\
# Reference

All options, in one place. `python -m docs.reference` makes this page from the code; an error here
is an error in `--help` or in a docstring, too.
"""

SAMPLING_HEAD = """\
Arguments of `SamplingParams(...)` in Python, flags of `wedlm generate`, and keys of `sampling` in \
a record of a [batch job](batch.md). What they mean where masks are filled out of order is in \
[Sampling options](sampling.md). None is refused unless its meaning is given.
"""
ENGINE_HEAD = """\
Arguments of `LLM(...)` in Python, and flags on the command line, where `max_batch_size` is \
`--batch-size` and the last five have none. None is refused unless its meaning is given.
"""
RECIPE_HEAD = """\
A YAML file for `wedlm train --config`; on the command line, `key=value` replaces a field and \
`+key=value` adds to a mapping. Ready-made recipes are in `configs/`.
"""


class Caught(Exception):
    """Carries the parser that was about to parse."""


def parser_of(main: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """Returns the parser that a command's `main` makes first; the command is not run."""

    def catch(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Caught(parser)

    try:
        with mock.patch.object(argparse.ArgumentParser, "parse_args", catch):
            main([])
    except Caught as caught:
        (parser,) = caught.args
        return parser
    raise AssertionError(f"{main.__module__} parses no arguments")


def subcommand_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of `wedlm NAME`."""
    return parser_of(subcommand(name))


def module_parser(name: str) -> argparse.ArgumentParser:
    """Returns the parser of `python -m NAME`."""
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    return parser_of(module.main)


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD, "## Commands\n"]
    parts += [command(f"wedlm {name}", subcommand_parser(name)) for name in SUBCOMMANDS]
    parts += [command(f"python -m {name}", module_parser(name)) for name in MODULES]
    statuses = [(str(status), meaning) for status, meaning in EXIT_STATUS.items()]
    parts += ["## Exit status\n", "For every command:\n", table(("status", "meaning"), statuses)]
    parts += ["\n## Sampling parameters\n", SAMPLING_HEAD, option_table(SamplingParams)]
    parts += ["\n## Engine options\n", ENGINE_HEAD, option_table(EngineConfig)]
    parts += ["\n## Recipes\n", RECIPE_HEAD, recipe_table()]
    parts += ["\n## Python\n"]
    parts += [described_class(getattr(importlib.import_module(m), n)) for m, n in pairs(CLASSES)]
    functions = [getattr(importlib.import_module(m), n) for m, n in pairs(FUNCTIONS)]
    parts += [described_function(f, f"### {f.__name__}", f.__module__) for f in functions]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def pairs(names: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(module, name) for module, some in names.items() for name in some]


# --- commands -------------------------------------------------------------------------------


def command(name: str, parser: argparse.ArgumentParser) -> str:
    """Returns the section of a command: what it does and its options."""
    text = textwrap.dedent(str(parser.description or "")).strip()
    is_list = re.search(r"^ {2}", text, re.MULTILINE)
    lines = [f"### {name}\n", f"```text\n{text}\n```" if is_list else as_markdown(text), ""]
    rows = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        shown = action.help or ""
        shown = shown % {**vars(action), "prog": parser.prog} if "%" in shown else shown
        rows.append((f"`{invocation(action)}`", shown))
    return "\n".join([*lines, table(("option", "meaning [default]"), rows), ""])


def invocation(action: argparse.Action) -> str:
    """Returns an option as it is typed."""
    if action.nargs == 0:
        return action.option_strings[-1]
    if action.choices is not None:
        value = " or ".join(map(str, action.choices))
    else:
        value = str(action.metavar or action.dest.upper()).replace("|", " or ")
    words = [*action.option_strings[-1:], value, *["..."] * (action.nargs in ("+", "*"))]
    return " ".join(words)


# --- fields ---------------------------------------------------------------------------------

FIELD_HEADS = ("field", "default", "values", "meaning")


def option_table(kind: type) -> str:
    """Returns the table of the options in a dataclass, `SamplingParams` or `EngineConfig`."""
    rows = []
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, option in options_of(kind).items():
        meaning = option.help + (f"; None: {option.none}" if option.none else "")
        default = f"`{default_of(fields[name])!r}`"
        rows.append((f"`{name}`", default, option_bounds(option), meaning))
    return table(FIELD_HEADS, rows)


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def option_bounds(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    return option.bounds.removeprefix("of ") or ("true or false" if option.flag else "")


def recipe_table() -> str:
    """Returns the table of the fields of a training recipe."""
    rows: list[tuple[str, str, str, str]] = []

    def walk(section: type, prefix: str) -> None:
        hints = get_type_hints(section)
        for field in dataclasses.fields(section):
            if dataclasses.is_dataclass(hints[field.name]):
                walk(hints[field.name], f"{prefix}{field.name}.")
                continue
            default = default_of(field)
            if default is None or isinstance(default, bool):
                default = {None: "null", True: "true", False: "false"}[default]
            option = field.metadata["option"]
            name = f"`{prefix}{field.name}`"
            rows.append((name, f"`{default}`", option_bounds(option), option.help))

    walk(TrainConfig, "")
    return table(FIELD_HEADS, rows)


# --- Python ---------------------------------------------------------------------------------


def described_class(cls: type) -> str:
    """Returns the section of a class: its docstring, and its public methods and properties."""
    lines = [f"### {cls.__name__}\n", f"`from {home(cls)} import {cls.__name__}`\n"]
    if "__init__" in vars(cls) and not dataclasses.is_dataclass(cls):
        lines += [f"```python\n{signature(cls.__name__, cls)}\n```\n"]
    lines += [docstring(cls), ""]
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property) and member.__doc__:
            lines += [f"**`{name}`**: {docstring(member)}", ""]
        elif inspect.isfunction(member):
            lines += [described_function(member, f"#### {cls.__name__}.{name}"), ""]
    return "\n".join(lines)


def described_function(function: Any, title: str, module: str | None = None) -> str:
    """Returns the section of a function: its signature and its docstring."""
    origin = "" if module is None else f"`from {module} import {function.__name__}`\n\n"
    shown = signature(function.__name__, function)
    return f"{title}\n\n{origin}```python\n{shown}\n```\n\n{docstring(function)}"


def home(cls: type) -> str:
    import wedlm_jax

    return "wedlm_jax" if cls.__name__ in wedlm_jax.__all__ else cls.__module__


def signature(name: str, function: Any) -> str:
    """Returns a signature, on one line or with one parameter per line."""
    found = inspect.signature(function)
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    returns = found.return_annotation
    result = "" if returns in (inspect.Signature.empty, "None") else f" -> {returns}"
    words = [parameter(p) for p in parameters]
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= 96:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){result}"])


def parameter(found: inspect.Parameter) -> str:
    """Returns a parameter as it is written, its annotation without quotes."""
    stars = {found.VAR_POSITIONAL: "*", found.VAR_KEYWORD: "**"}.get(found.kind, "")
    kind = found.annotation if isinstance(found.annotation, str) else formatted(found.annotation)
    annotation = "" if found.annotation is found.empty else f": {kind}"
    default = "" if found.default is found.empty else f" = {found.default!r}"
    return f"{stars}{found.name}{annotation}{default}"


def formatted(annotation: Any) -> str:
    """Returns a type as it is written."""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", inspect.formatannotation(annotation))


def docstring(item: Any) -> str:
    """Returns a docstring as Markdown, with arguments and the like as lists."""
    text = inspect.cleandoc(item.__doc__ or "")
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    lines = [as_markdown(parts[0].strip()), ""]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        entries = textwrap.dedent(body).strip()
        if title in ("Returns", "Yields"):
            lines += [f"{title}: {as_markdown(entries)}\n"]
        else:
            lines += [f"{title}:\n", *(f"- {entry}" for entry in as_entries(entries)), ""]
    return "\n".join(lines).strip() + "\n"


def as_entries(text: str) -> Iterable[str]:
    """Splits a section of a docstring into its entries, ``name: what it is``."""
    for entry in re.split(r"\n(?=\S)", text):
        named = re.match(r"(\w[\w, ]*): (.*)", entry, re.DOTALL)
        if named is None:
            yield as_markdown(entry)
        else:
            names = ", ".join(f"`{name.strip()}`" for name in named[1].split(","))
            yield f"{names}: {as_markdown(named[2])}"


def as_markdown(text: str) -> str:
    """Returns docstring or help text with one line per paragraph and single backticks."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    joined = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    pieces = re.split(r"(`[^`]*`)", joined.replace("``", "`"))
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;") for p in pieces)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; no cell may have a bar inside backticks."""
    cells = [[as_markdown(cell).replace("|", "&#124;") for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
