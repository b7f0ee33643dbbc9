"""The `wedlm` command: one line per subcommand, each imported only when called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from wedlm_jax import __version__
from wedlm_jax.errors import BAD_INPUT, did_you_mean
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.signals import exit_process

SUBCOMMANDS = {
    "demo": ("infer.demo", "watch the included model decode, and measure it"),
    "generate": ("infer.generate", "complete a prompt, or files of prompts as a batch job"),
    "chat": ("infer.chat.command", "chat with a model in the terminal"),
    "plot": ("infer.plots", "draw a trace of `wedlm generate --trace`"),
    "serve": ("infer.serve.command", "serve a model over the OpenAI API"),
    "evaluate": ("infer.evaluate", "measure accuracy and speed of the decoders on questions"),
    "bench": ("infer.bench.command", "measure the speed of windows and drafts against AR"),
    "train": ("train.command", "train a model from a recipe in configs/"),
    "tokenize": ("train.data.command", "tokenise and pack training data, once"),
    "tokenizer": ("train.data.tokenizer", "train a tokenizer on texts and conversations"),
    "rows": ("train.data.shards", "show packed training rows as text"),
    "convert": ("wedlm_jax.checkpoint.convert", "convert a checkpoint: Hugging Face, orbax, GGUF"),
    "export": (
        "wedlm_jax.checkpoint.convert:export",
        "write a checkpoint for programs that do not know WeDLM",
    ),
    "info": ("wedlm_jax.checkpoint.info", "describe a checkpoint folder"),
}

HELP = """\
usage: wedlm COMMAND [options]        (details: wedlm COMMAND --help)

Causal diffusion language models in JAX: WeDLM fills several masked tokens per
forward pass under causal attention.

commands:
{commands}

examples:
  wedlm demo
  wedlm chat
  wedlm generate --chat --prompt "Count from 12 to 40 in steps of 2."
  wedlm generate --model DIR --input prompts.jsonl --output completions.jsonl
"""


def help_text() -> str:
    lines = [f"  {name:<10} {what}" for name, (_, what) in SUBCOMMANDS.items()]
    return HELP.format(commands="\n".join(lines))


def subcommand(name: str) -> Callable[[list[str]], int]:
    """Imports and returns the function of a subcommand: ``main``, unless another is named."""
    module, _, function = SUBCOMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function or "main")  # type: ignore[no-any-return]


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status, one of `wedlm_jax.errors.EXIT_STATUS`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"wedlm-jax {__version__}")
        return 0
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        print(f"wedlm: no command {name!r}; {did_you_mean(name, SUBCOMMANDS)}", file=sys.stderr)
        return BAD_INPUT
    return run_command(f"wedlm {name}", lambda: subcommand(name)(rest))


def process() -> NoReturn:
    """Runs a subcommand and ends the process with its exit status."""
    exit_process(main())


if __name__ == "__main__":
    # `python -m` puts the working folder first, where a user may have a train.py or an infer/.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    process()
