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
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import CommandParser, at_least_1


class Comparison(NamedTuple):
    """What can be compared.

    Attributes:
      function: function in `infer.bench` that takes subject, regimes, options and report.
      meaning: for the help.
      options: those of `OPTIONS` that it takes, with their defaults.
    """

    function: str
    meaning: str
    options: Mapping[str, Any]


_SPEEDS = {"rival": None, "prompts": None, "max_tokens": 160, "passes": 3}
COMPARISONS = {
    "windows": Comparison(
        "speeds:compare_windows",
        "tokens per second of the held-out questions, by window and by sequences that\n"
        "decode together, against AR; with --rival, against another library",
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
        "the same by where the drafts of mode verified come from",
        {"batch_size": [1, 8, 32], "draft": ["masks", "lookup", "auto"], **_SPEEDS},
    ),
    "identity": Comparison(
        "identity:compare_identity",
        "completions of mode verified against AR's: how many are not the same, and\n"
        "how close AR's two best tokens were where they first differ",
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
        "masks in a window, one or more; 0 is AR",
        {"type": _window, "nargs": "+", "metavar": "W"},
    ),
    "mode": (
        "how windows are decoded, one or more",
        {"nargs": "+", "choices": ("paper", "verified")},
    ),
    "draft": (
        "where drafts come from, one or more, beside AR; identity without it: masks, or lookup and "
        "auto for a model that was not trained on masks",
        {"nargs": "+", "choices": ("masks", "lookup", "both", "auto")},
    ),
    "rival": (
        "another library's AR on the same weights; one at a time also its prompt lookup, in "
        "drafts, and in windows mode paper by whole forwards, without a cache",
        {"choices": RIVALS},
    ),
    "prompts": (
        "how many prompts: of each regime in windows and drafts, without it 2 for each sequence "
        "and at least 24; in identity of all together, without it all",
        _COUNT,
    ),
    "temperature": ("0 is greedy", {"type": _temperature, "metavar": "X"}),
    "max_tokens": ("the most tokens of a completion", _COUNT),
    "passes": ("timed passes", _COUNT),
    "plot": ("also draw the speeds (.svg, .png or .pdf; needs matplotlib)", {"metavar": "FILE"}),
}
"""What comparisons may take: what it means, and how it is parsed."""

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
    """Adds the options that say which model decodes which questions, and how it is held; one that
    is not given is to be absent from what is parsed."""
    add_engine_options(parser, names=("model", *SHARED))
    questions = (
        f"JSONL, one or more; {HUMAN_EVAL} for the prompts of the package human-eval "
        "[those of the embedded model]"
    )
    parser.add_argument("--questions", nargs="+", metavar="FILE", help=questions)
    regimes = "kinds of questions, one or more [all]"
    parser.add_argument("--regime", nargs="+", metavar="N", help=regimes)


def _parser() -> CommandParser:
    meanings = "".join(
        f"  {name:<10}" + one.meaning.replace("\n", f"\n{'':12}") + "\n"
        for name, one in COMPARISONS.items()
    )
    parser = CommandParser(
        prog="wedlm bench",
        description="Measures on this machine, all that is compared in one process and by turns:"
        f"\n\n{meanings}\nEverything runs once untimed, which compiles; figures are medians over "
        "the passes,\nratios those of the turns, with the least and the greatest.",
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
        help="measure nothing: compile for TPUs that are not here, such as v5e:2x4, and tell from "
        "how many tokens per forward on windows would pay there (needs libtpu; minutes); takes "
        f"--model, --drafter, --batch-size [{_shown(PREDICTED['batch_size'])}], --window-size "
        f"[{_shown(PREDICTED['window_size'])}] and --output",
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
    """Returns the default of each comparison, or the one that all share, as help says it."""
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
    """Refuses options that cannot be, before anything is loaded."""
    for name in OPTIONS.keys() & options.keys():
        of = [c for c, one in COMPARISONS.items() if name in one.options]
        if not set(of) & set(chosen):
            raise InputError(
                f"{flag(name)} is an option of {' and '.join(of)}, not of {' and '.join(chosen)}"
            )
    if "identity" in chosen and options.get("window_size") == [0]:
        raise InputError("--window-size 0 is AR, which identity compares others with: name one")
    if "rival" in options:
        if "quantization" in options:
            raise InputError(
                "--rival and --quantization: the other library's weights are not rounded"
            )
        check_rival()
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
        options["rival"] = Rival(subject)
    for name in chosen:
        module, _, function = COMPARISONS[name].function.partition(":")
        compare = getattr(importlib.import_module(f"infer.bench.{module}"), function)
        defaults = COMPARISONS[name].options
        compare(
            subject, regimes, {key: options.get(key, defaults[key]) for key in defaults}, report
        )
    return 0


def _predict(options: Mapping[str, Any]) -> int:
    taken = {"predict", "model", "drafter", "output", *PREDICTED}
    if wrong := sorted(options.keys() - taken):
        raise InputError(f"{flag(wrong[0])} goes without --predict, which measures nothing")

    from infer.bench.measure import Report
    from infer.bench.predict import predict

    predict(PREDICTED | dict(options), Report(options.get("output")))
    return 0
