"""The command line of `wedlm bench`: which comparison has which options, and their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from infer.bench.rival import RIVALS
from infer.bench.subject import SHAPES
from infer.bench.work import MAX_TOKENS, Regimes
from infer.evaluate import EMBEDDED_QUESTIONS
from infer.harness.human_eval import HUMAN_EVAL, code_questions
from infer.plots import check_plot
from wedlm_jax.benchmark import BenchmarkParser
from wedlm_jax.errors import InputError
from wedlm_jax.records.questions import Question, read_questions

COMPARISONS = {
    "windows": "tokens/s on the held-out questions, by window size and batch size, against\n"
    "AR; with --rival, against another library too",
    "drafts": "tokens/s by the source of drafts in mode verified",
    "floor": "the time of a forward against its matrix products alone on the same number of\n"
    "tokens, and the time that a prompt adds",
    "gaps": "how long the device waits for the host between bursts, and the speed of short\n"
    "bursts, which streams use, against long ones",
    "pages": "prompts of mixed lengths: the share of computed tokens that are real, the share\n"
    "of allocated cache in use, and how many sequences fit in the same memory",
    "chunks": "a prompt of 16k tokens: its last chunk against its first, and how long other\n"
    "sequences wait for a token meanwhile",
    "identity": "mode verified against AR: how many completions differ, and how close AR's\n"
    "two best tokens were at the first difference",
    "soak": "random prompts for an hour: fails if a program is compiled on the way, or\n"
    "memory grows after the first quarter",
}
ON_QUESTIONS = ("windows", "drafts", "gaps", "pages", "identity")
"""Cannot be measured with random weights."""
OF_A_MODEL = ("windows", "drafts", "floor", "gaps", "pages", "identity", "soak")

BATCH_SIZES = {
    "windows": [1, 8, 32, 128],
    "drafts": [1, 8, 32],
    "floor": [1, 8, 32],
    "gaps": [1, 8, 32],
    "pages": [32],
    "identity": [64],
    "soak": [16],
}
WINDOWS: dict[str, list[int | str]] = {
    "windows": [0, 4, 8, 16, "auto"],
    "floor": [0, 16],
    "gaps": [0, 16],
    "pages": [0, 16],
    "identity": [1, 2, 4, 8, 16, 32],
    "soak": [16],
}
MODES = {
    "windows": ["paper", "verified"],
    "floor": ["paper", "verified"],
    "gaps": ["verified"],
    "pages": ["verified"],
    "soak": ["verified"],
}
DRAFTS = ("masks", "lookup", "auto")
PASSES, MINUTES, LONG_PROMPT = 3, 60.0, 16_384

EXAMPLES = (
    "wedlm bench --compare windows --batch-size 1 32 --window-size 0 16 auto --plot speeds.svg",
    "wedlm bench --compare windows --window-size 0 --rival transformers",
    "wedlm bench --compare drafts --model smollm2 --questions FILE human-eval --batch-size 1 8",
    "wedlm bench --compare floor --batch-size 1 8 32 --output floor.json",
    "wedlm bench --compare pages chunks",
    "wedlm bench --compare identity --dtype bfloat16 --window-size 4 16 --deterministic",
    "wedlm bench --compare soak --minutes 60 --output soak.json",
    "wedlm bench --shape qwen3-0.6b --dtype float32 --rival transformers",
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line; ``compare`` is a list, ``window_size`` of windows.

    Raises:
      InputError: naming the first option that cannot be.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    options.compare = options.compare or ["windows" if options.shape is None else "floor"]
    _check_subject(options)
    parser.check(options)
    counts = [*(options.batch_size or []), options.passes, options.prompts, options.max_tokens]
    if any(count is not None and count < 1 for count in counts):
        raise InputError("--batch-size, --prompts, --max-tokens and --passes: expected at least 1")
    if options.minutes is not None and not options.minutes > 0:
        raise InputError(f"--minutes: expected a number above 0, not {options.minutes:g}")
    if options.temperature is not None and not options.temperature >= 0:
        raise InputError(f"--temperature: expected at least 0, not {options.temperature:g}")
    if options.window_size is not None:
        options.window_size = [_window(text) for text in options.window_size]
    if "identity" in options.compare and options.window_size == [0]:
        raise InputError("--window-size 0 is AR, which identity compares others with: name one")
    if options.plot is not None:
        check_plot(options.plot)
    return options


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser(
        "wedlm bench",
        COMPARISONS,
        default="windows; floor with --shape",
        closing="Everything runs once untimed, which compiles; figures are medians over the "
        "passes.",
        examples=EXAMPLES,
    )
    timed = ("windows", "drafts", "floor", "gaps", "chunks")
    windowed = ("windows", "floor", "gaps", "pages", "identity", "soak")
    _add_subject_options(parser)
    add = parser.add
    add(
        "--batch-size",
        "sequences that decode together, one or more [windows 1 8 32 128, drafts 1 8 32, "
        "floor 1 8 32, or 1 with --shape, pages 32, identity 64, soak 16]",
        of=OF_A_MODEL,
        type=int,
        nargs="+",
        metavar="N",
    )
    add(
        "--window-size",
        "one or more, 0 is AR [windows 0 4 8 16 auto, floor, gaps and pages 0 16, identity "
        "1 2 4 8 16 32, soak 16]",
        of=windowed,
        nargs="+",
        metavar="W",
    )
    add(
        "--mode",
        "how windows are decoded, one or more [windows and floor both, else verified]",
        of=tuple(MODES),
        nargs="+",
        choices=("paper", "verified"),
    )
    add(
        "--draft",
        "where drafts come from, one or more, beside AR [drafts all; identity masks, or lookup and "
        "auto for a model that was not trained on masks]",
        of=("drafts", "identity"),
        nargs="+",
        choices=DRAFTS,
    )
    add(
        "--rival",
        "another library's AR on the same weights; in drafts its prompt lookup, too, one at a time",
        of=("windows", "drafts", "floor"),
        choices=RIVALS,
    )
    add(
        "--prompts",
        "how many prompts: of each regime in windows and drafts [2 for each sequence, at least "
        "24], of all together in identity [all]",
        of=("windows", "drafts", "identity"),
        type=int,
        metavar="N",
    )
    add(
        "--prompt-tokens",
        f"tokens of the long prompt [{LONG_PROMPT}]",
        of=("chunks",),
        type=int,
        metavar="N",
    )
    add("--temperature", "0 is greedy [0]", of=("identity",), type=float, metavar="X")
    longest = f"the most tokens of a completion [{MAX_TOKENS}]"
    add("--max-tokens", longest, of=("identity",), type=int, metavar="N")
    minutes = f"how long each window is decoded [{MINUTES:g}]"
    add("--minutes", minutes, of=("soak",), type=float, metavar="X")
    add("--passes", f"timed passes [{PASSES}]", of=timed, type=int, metavar="N")
    add(
        "--plot",
        "also draw the speeds (.svg, .png or .pdf; needs matplotlib)",
        of=("windows",),
        metavar="FILE",
    )
    return parser


def _add_subject_options(parser: BenchmarkParser) -> None:
    """Adds the options that say which model decodes which questions, and how it is held."""
    add = parser.add
    add("--model", "checkpoint folder [the embedded model]", of=OF_A_MODEL, metavar="DIR")
    add(
        "--shape",
        "random weights of this shape instead, and random prompts "
        "[chunks: embedded, with a long context]",
        of=("floor", "chunks", "soak"),
        choices=tuple(SHAPES),
    )
    dtype = "type of weights and arithmetic [float32 on a CPU, else bfloat16]"
    add("--dtype", dtype, choices=("float32", "bfloat16"))
    add("--quantization", "round the weights to 8 bits", of=OF_A_MODEL, choices=("int8",))
    add(
        "--kv-cache-dtype",
        "round keys and values to 8 bits",
        of=OF_A_MODEL,
        choices=("int8",),
    )
    add("--deterministic", "every forward in one shape", of=OF_A_MODEL, action="store_true")
    on_questions = ("windows", "drafts", "floor", "gaps", "pages", "identity")
    add(
        "--questions",
        f"JSONL, one or more; {HUMAN_EVAL} for the prompts of the package human-eval "
        "[those of the embedded model]",
        of=on_questions,
        nargs="+",
        metavar="FILE",
    )
    regimes = "kinds of questions, one or more [all]"
    add("--regime", regimes, of=on_questions, nargs="+", metavar="N")


def _check_subject(options: argparse.Namespace) -> None:
    if options.quantization is not None:
        from wedlm_jax.model.quantization import check_quantization

        check_quantization(options.quantization)
    if options.shape is not None:
        if wanting := [name for name in ON_QUESTIONS if name in options.compare]:
            raise InputError(
                f"--shape: {' and '.join(wanting)} decode questions, which random weights cannot; "
                "floor, chunks and soak can do with them"
            )
        if options.model is not None:
            raise InputError("--model and --shape: expected one of them")
    if options.rival is not None and options.quantization is not None:
        raise InputError("--rival and --quantization: the other library's weights are not rounded")


def _window(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        window = int(text)
    except ValueError:
        window = -1
    if window < 0:
        raise InputError(f"--window-size: expected integers of at least 0 or 'auto', not {text!r}")
    return window


def regimes_of(options: argparse.Namespace) -> Regimes:
    """Reads the questions that the options name.

    Raises:
      InputError: there is no such file, or no such regime in it.
    """
    regimes: dict[str, Sequence[Question]] = {}
    for source in options.questions or [EMBEDDED_QUESTIONS]:
        if source == HUMAN_EVAL:
            regimes["code"] = code_questions()
        else:
            regimes |= read_questions(Path(source))
    for name in options.regime or []:
        if name not in regimes:
            raise InputError(f"--regime: expected one of {', '.join(regimes)}, not {name!r}")
    return {name: regimes[name] for name in options.regime or regimes}
