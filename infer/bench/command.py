"""`wedlm bench`: the command. What is compared is in a file each beside this one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.evaluate import EMBEDDED_QUESTIONS
from infer.heldout import read_questions
from infer.plots import check_plot, draw_speeds
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from infer.bench.rival import Rival
    from infer.bench.subject import Subject
    from infer.bench.turns import Bar
    from infer.bench.work import Regimes

COMPARISONS = ("windows", "floor", "pages", "chunks")
ROWS = {"windows": [1, 8, 32, 128], "floor": [1, 8, 32], "pages": [32]}
WINDOWS: dict[str, list[int | str]] = {
    "windows": [0, 4, 8, 16, "auto"],
    "floor": [0, 16],
    "pages": [0, 16],
}
MODES = {
    "windows": ["paper", "verified"],
    "floor": ["paper", "verified"],
    "pages": ["verified"],
}
LONG_PROMPT = 16_384

DESCRIPTION = """\
Measures decoding on this machine, all that is compared in one process and by turns:

  windows  tokens a second of the held-out questions, by window and by sequences that
           decode together, against AR; with --rival, against another library
  floor    milliseconds of a forward against its linear layers and head alone at the
           same number of real tokens, and what a prompt costs beside its forwards
  pages    with lengths mixed: real tokens among those computed, places in use in
           allocated pages, sequences that fit where rectangles of the longest would
  chunks   a prompt of 16k tokens: its last chunk against its first, and the time between
           the tokens of others meanwhile

Everything runs once untimed, which compiles; figures are medians over the passes."""

EXAMPLES = """\
examples:
  wedlm bench --compare windows --rows 1 32 --window-size 0 16 auto --plot speeds.svg
  wedlm bench --compare windows --window-size 0 --rival transformers
  wedlm bench --compare floor --rows 1 8 32 --output floor.json
  wedlm bench --compare pages chunks
  wedlm bench --shape qwen3-0.6b --dtype float32 --rival transformers"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures of a comparison: records for the JSON file under a name, and a table."""

    name: str
    records: Sequence[Any]
    table: Table


def main(arguments: list[str]) -> int:
    from infer.bench.rival import check_rival

    options = _parser().parse_args(arguments)
    _check(options)
    if options.rival is not None:
        check_rival()
    if options.plot is not None:
        check_plot(options.plot)
    regimes = None
    if options.shape is None:
        regimes = _regimes(options)

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from infer.bench.turns import Bar
    from wedlm_jax.compiled_cache import keep_compiled

    keep_compiled()
    figures: dict[str, Any] = {"machine": machine()}
    columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn())
    console = Console(highlight=False)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for outcome in _compare(options, regimes, Bar(progress)):
            records = [dataclasses.asdict(record) for record in outcome.records]
            figures.setdefault(outcome.name, []).extend(records)
            console.print(outcome.table)
            if options.output is not None:
                text = json.dumps(figures, indent=1)
                Path(options.output).write_text(text + "\n", encoding="utf-8")
            if options.plot is not None and "windows" in figures:
                from infer.speed import Speed

                draw_speeds([Speed(**record) for record in figures["windows"]], options.plot)
    return 0


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    from infer.bench.rival import RIVALS
    from infer.bench.subject import SHAPES

    parser = argparse.ArgumentParser(
        prog="wedlm bench",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--compare",
        nargs="+",
        choices=COMPARISONS,
        metavar="WHAT",
        help="one or more of the above [windows; floor with --shape]",
    )
    add("--model", metavar="DIR", help="checkpoint folder [the embedded model]")
    add(
        "--shape",
        choices=tuple(SHAPES),
        help="random weights of this shape instead; for floor "
        "(with random prompts) and chunks [chunks: embedded, with a long context]",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="[float32 on a CPU, else bfloat16]")
    add("--questions", metavar="FILE", help="JSONL questions [those of the embedded model]")
    add("--regime", nargs="+", metavar="NAME", help="of the questions, one or more [all]")
    add(
        "--rows",
        type=int,
        nargs="+",
        metavar="N",
        help="sequences at a time, one or more [windows: 1 8 32 128, floor: 1 8 32, "
        "with --shape: 1, pages: 32]",
    )
    add(
        "--window-size",
        nargs="+",
        metavar="W",
        help="windows, 0 is AR [windows: 0 4 8 16 auto, others: 0 16]",
    )
    add(
        "--mode",
        nargs="+",
        choices=("paper", "verified"),
        help="of the windows, one or more [both; pages: verified]",
    )
    add(
        "--rival",
        choices=RIVALS,
        help="another library's AR on the same weights, beside windows and floor",
    )
    add(
        "--prompts",
        type=int,
        metavar="N",
        help="windows: questions of a regime [2 for each sequence, at least 24]",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=LONG_PROMPT,
        metavar="N",
        help="chunks: tokens of the long prompt [16384]",
    )
    add("--passes", type=int, default=3, metavar="N", help="timed passes [3]")
    add("--output", metavar="FILE", help="also write all figures as JSON")
    add(
        "--plot",
        metavar="FILE",
        help="also draw the speeds of windows (.svg, .png or .pdf; needs matplotlib)",
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    counts = [*(options.rows or []), options.passes]
    if min(counts) < 1 or (options.prompts is not None and options.prompts < 1):
        raise InputError("--rows, --prompts and --passes: expected at least 1")
    if options.output is not None and not Path(options.output).resolve().parent.is_dir():
        raise InputError(f"--output {options.output}: no such folder to write it in")
    options.compare = options.compare or ["windows" if options.shape is None else "floor"]
    wanting = {"windows", "pages"} & set(options.compare)
    if options.shape is not None and wanting:
        raise InputError(
            f"--shape: {' and '.join(sorted(wanting))} decode questions, which random weights "
            "cannot; floor and chunks can"
        )
    if options.shape is not None and options.model is not None:
        raise InputError("--model and --shape: expected one of them")
    if options.window_size is not None:
        options.window_size = [_window(text) for text in options.window_size]


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


def _regimes(options: argparse.Namespace) -> Regimes:
    regimes = read_questions(Path(options.questions or EMBEDDED_QUESTIONS))
    for name in options.regime or []:
        if name not in regimes:
            raise InputError(f"--regime: expected one of {', '.join(regimes)}, not {name!r}")
    return {name: regimes[name] for name in options.regime or regimes}


def _compare(options: argparse.Namespace, regimes: Regimes | None, bar: Bar) -> Iterator[Outcome]:
    from infer.bench.rival import Rival
    from infer.bench.subject import SHAPES, load_subject, random_subject

    subject = rival = None
    if set(options.compare) - {"chunks"}:
        if options.shape is None:
            subject = load_subject(options.model, options.dtype)
        else:
            subject = random_subject(SHAPES[options.shape], options.dtype)
        if options.rival is not None:
            rival = Rival(subject)
    for name in options.compare:
        if name == "chunks" or subject is None:
            yield _chunks(options, bar)
        elif name == "floor":
            yield from _floor(options, subject, regimes, rival, bar)
        elif regimes is not None:
            yield from _on_questions(name, options, subject, regimes, rival, bar)


def _on_questions(
    name: str,
    options: argparse.Namespace,
    subject: Subject,
    regimes: Regimes,
    rival: Rival | None,
    bar: Bar,
) -> Iterator[Outcome]:
    from infer.bench.pages import compare_pages
    from infer.bench.tables import page_table
    from infer.bench.windows import compare_windows
    from infer.speed import speed_table

    rows, modes = options.rows or ROWS[name], options.mode or MODES[name]
    windows = options.window_size or WINDOWS[name]
    if name == "pages":
        fixed = [window for window in windows if isinstance(window, int)]
        for uses in compare_pages(subject, regimes, rows=rows, windows=fixed, modes=modes, bar=bar):
            yield Outcome("pages", uses, page_table(uses))
        return
    for speeds in compare_windows(
        subject,
        regimes,
        rows=rows,
        windows=windows,
        modes=modes,
        prompts=options.prompts,
        passes=options.passes,
        rival=rival,
        bar=bar,
    ):
        yield Outcome("windows", speeds, speed_table(speeds))


def _floor(
    options: argparse.Namespace,
    subject: Subject,
    regimes: Regimes | None,
    rival: Rival | None,
    bar: Bar,
) -> Iterator[Outcome]:
    from infer.bench.floor import ForwardCost, compare_floor
    from infer.bench.tables import forward_table, prompt_table

    windows = options.window_size or WINDOWS["floor"]
    rows = options.rows or ([1] if regimes is None else ROWS["floor"])
    for costs in compare_floor(
        subject,
        regimes,
        rows=rows,
        windows=[window for window in windows if isinstance(window, int)],
        modes=options.mode or MODES["floor"],
        passes=options.passes,
        rival=rival,
        bar=bar,
    ):
        if isinstance(costs[0], ForwardCost):
            forwards = [cost for cost in costs if isinstance(cost, ForwardCost)]
            yield Outcome("floor", forwards, forward_table(forwards))
        else:
            prompts = [cost for cost in costs if not isinstance(cost, ForwardCost)]
            yield Outcome("prompts", prompts, prompt_table(prompts))


def _chunks(options: argparse.Namespace, bar: Bar) -> Outcome:
    from infer.bench.chunks import compare_chunks
    from infer.bench.tables import chunk_table

    cost = compare_chunks(
        options.shape or "embedded",
        tokens=options.prompt_tokens,
        dtype=options.dtype,
        passes=options.passes,
        bar=bar,
    )
    return Outcome("chunks", [cost], chunk_table(cost))
