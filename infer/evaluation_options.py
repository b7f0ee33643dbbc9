"""The command line of `wedlm evaluate`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.flags import add_engine_options
from infer.plots import check_plot
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import check_writable
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.records.questions import MATCHES

KINDS = ("ar", "blockwise", "paper", "verified")
"""Of decoders, in the order in which they are compared."""

QUESTION_OPTIONS: dict[str, Any] = {
    "questions": None,
    "match": "exact",
    "chat": False,
    "samples": None,
    "decoders": KINDS,
    "passes": 3,
    "answers": None,
    "plot": None,
}
"""What only questions take, and the defaults."""

TASK_OPTIONS: dict[str, Any] = {
    "mode": "verified",
    "limit": None,
    "num_fewshot": None,
    "apply_chat_template": False,
    "include_path": (),
    "log_samples": False,
    "run_code": False,
}
"""What only tasks take, and the defaults."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser. An option that is not given is absent from the result."""
    result = CommandParser(
        prog="wedlm evaluate",
        usage="wedlm evaluate [--model DIR] [--questions FILE | --tasks NAME ...] [options]",
        description="Accuracy and speed of AR, block-wise, streaming and verified decoding from "
        "the same weights,\non questions held out from the embedded model's training, or your own; "
        "or the scores of a\nmodel on tasks of lm-evaluation-harness.",
        epilog="docs/evaluation.md tells the format of questions, and how HumanEval is run.\n\n"
        "examples:\n"
        "  wedlm evaluate --samples 100 --entropy-threshold 0.4 --plot scores.svg\n"
        "  wedlm evaluate --model DIR --questions questions.jsonl --decoders ar verified\n"
        "  wedlm evaluate --model DIR --tasks gsm8k --limit 200 --batch-size 64",
        argument_default=argparse.SUPPRESS,
    )
    add_engine_options(result.add_argument_group("model"), batch_size="1; tasks 16")
    _add_decoding(result.add_argument_group("decoding"))
    _add_questions(result.add_argument_group("questions"))
    _add_tasks(result.add_argument_group("tasks; these need wedlm-jax[eval]"))
    return result


def _add_decoding(group: Any) -> None:
    add = group.add_argument
    add("--window-size", type=int, metavar="N", help="W, how many masks draft in parallel [16]")
    add(
        "--entropy-threshold",
        type=float,
        nargs="+",
        metavar="X",
        help="τ in nats of mode paper; with questions one or more [0.2 0.4 0.6 0.9; tasks 0.4]",
    )
    add("--position-penalty", type=float, metavar="X", help="λ of mode paper [0.02]")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="the most tokens of an answer [160, own questions 512; tasks: what each says]",
    )
    add("--output", metavar="FILE", help="also write the scores as JSON")


def _add_questions(group: Any) -> None:
    add = group.add_argument
    add("--questions", metavar="FILE", help="JSONL questions [those of the embedded model]")
    add(
        "--match",
        choices=MATCHES,
        help="how answers are judged where a question does not say [exact]",
    )
    add("--chat", action="store_true", help="a prompt is a user's message, for the chat template")
    samples = "how many questions of each regime [300; own questions all]"
    add("--samples", type=int, metavar="N", help=samples)
    add(
        "--decoders",
        nargs="+",
        choices=KINDS,
        metavar="NAME",
        help=f"which to compare, of {', '.join(KINDS)} [all; ar of a model that knows no masks]",
    )
    add("--passes", type=int, metavar="N", help="timed passes [3]")
    add("--answers", metavar="FILE", help="also write each answer and its verdict as JSONL")
    add(
        "--plot", metavar="FILE", help="also draw the scores (.svg, .png or .pdf; wants matplotlib)"
    )


def _add_tasks(group: Any) -> None:
    add = group.add_argument
    add("--tasks", nargs="+", metavar="NAME", help="names or YAML files of tasks")
    add("--mode", choices=("verified", "paper", "ar"), help="how answers are decoded [verified]")
    add("--limit", type=int, metavar="N", help="how many documents of each task [all]")
    add("--num-fewshot", type=int, metavar="N", help="solved examples before each [as tasks say]")
    add("--apply-chat-template", action="store_true", help="ask through the chat template [off]")
    add(
        "--include-path",
        nargs="+",
        metavar="DIR",
        help="folders with tasks of your own [none]",
    )
    add("--log-samples", action="store_true", help="with --output: keep every answer in it [off]")
    add(
        "--run-code",
        action="store_true",
        help="run programs that the model wrote, which human_eval is scored by [off]",
    )


def check(given: Mapping[str, Any]) -> None:
    """Refuses options that contradict one another, before anything is loaded.

    Raises:
      InputError: naming the flag.
    """
    tasks = "tasks" in given
    if others := (QUESTION_OPTIONS if tasks else TASK_OPTIONS).keys() & given.keys():
        flag = f"--{min(others).replace('_', '-')}"
        raise InputError(f"{flag} goes {'without' if tasks else 'with'} --tasks")
    for name in ("samples", "passes", "limit", "max_tokens"):
        if given.get(name, 1) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag}: expected at least 1, not {given[name]}")
    for name in ("output", "answers"):
        if name in given:
            check_writable(Path(given[name]), f"--{name}")
    if "plot" in given:
        check_plot(given["plot"])
