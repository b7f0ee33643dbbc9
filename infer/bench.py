"""`wedlm bench`: how fast a batch decodes, continuous against fixed, and window by window.

All that is compared runs in one process, by turns, after everything has run once untimed,
which compiles; figures are medians over the passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from infer.evaluate import EMBEDDED_QUESTIONS
from infer.heldout import read_questions
from infer.plots import check_plot, draw_speeds
from infer.speed import Speed, speed_table
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from infer.heldout import Question
    from wedlm_jax.llm import LLM
    from wedlm_jax.scheduler import Row, Scheduler

PROMPTS_A_ROW = 6
"""Prompts for each row of a batch: enough that rows are taken over several times."""
LENGTHS = (4, 160)
"""Completions are cut at a length between these, drawn so that its logarithm is uniform: most
are short, some are long, as prompts of different users are."""
SHOTS = 5
LONG_ONE_IN = 8
"""Of prompts of several lengths, one in so many stands behind the shots."""
MORE_ROWS = 4
"""How many times as many rows short prompts may have as long ones, in the same memory."""
WINDOWS: tuple[int | str, ...] = (0, 4, 8, 16, 32, "auto")
COMPARISONS = ("batches", "prefixes", "lengths", "windows")


Run = Callable[["LLM"], tuple[int, int]]
"""Decodes all prompts once; returns tokens and forwards, summed over the prompts."""

Regimes = Mapping[str, "Sequence[Question]"]
"""Questions by regime."""

Ways = dict[str, tuple["LLM", Run]]
"""What is compared, by name."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="wedlm bench",
        description="Tokens a second of batches of the held-out prompts, completions of mixed\n"
        "lengths: continuous batching against fixed batches, beginnings computed once\n"
        "against each time, short and long prompts apart against together, and windows\n"
        "against AR.",
        epilog="example:\n  wedlm bench --rows 1 8 32 128 --output speeds.json --plot speeds.svg",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", metavar="DIR", help="checkpoint folder [the embedded model]")
    add("--questions", metavar="FILE", help="JSONL questions [those of the embedded model]")
    add("--rows", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N",
        help="prompts at a time, one or more [1 8 32 128]")  # fmt: skip
    add("--compare", nargs="+", choices=COMPARISONS, default=list(COMPARISONS),
        help="what, in the order above; one or more [all]")  # fmt: skip
    add("--prompts", type=int, metavar="N",
        help=f"prompts in all [{PROMPTS_A_ROW} a row, at least 24]")  # fmt: skip
    add("--window-size", nargs="+", default=[str(w) for w in WINDOWS], metavar="W",
        help="windows to compare, 0 is AR [0 4 8 16 32 auto]")  # fmt: skip
    add("--mode", nargs="+", choices=("paper", "verified"), default=["paper", "verified"],
        help="of the windows, one or more [paper verified]")  # fmt: skip
    add("--fixed-window", type=int, default=16, metavar="W",
        help="window of the comparison with fixed batches [16]")  # fmt: skip
    add("--passes", type=int, default=3, metavar="N", help="timed passes [3]")
    add("--output", metavar="FILE", help="also write the figures as JSON")
    add("--plot", metavar="FILE", help="also draw them (.svg, .png or .pdf; needs matplotlib)")
    options = parser.parse_args(arguments)
    counts = [*options.rows, options.passes]
    if min(counts) < 1 or (options.prompts is not None and options.prompts < 1):
        raise InputError("--rows, --prompts and --passes: expected at least 1")
    if options.output is not None and not Path(options.output).resolve().parent.is_dir():
        raise InputError(f"--output {options.output}: no such folder to write it in")
    if options.plot is not None:
        check_plot(options.plot)
    windows = [_window(text) for text in options.window_size]
    regimes = read_questions(Path(options.questions or EMBEDDED_QUESTIONS))
    speeds: list[Speed] = []
    from rich.console import Console

    console = Console(highlight=False)
    for rows in options.rows:
        for some in _compare(options, regimes, rows, windows):
            speeds += some
            console.print(speed_table(some))
            if options.output is not None:
                text = json.dumps([dataclasses.asdict(speed) for speed in speeds], indent=1)
                Path(options.output).write_text(text + "\n", encoding="utf-8")
            if options.plot is not None:
                draw_speeds(speeds, Path(options.plot))
        _forget_programs()
    return 0


def _forget_programs() -> None:
    """Lets go of what was compiled: on a CPU each program takes about a hundred memory maps, of
    which Linux allows a process 65,530."""
    import jax

    gc.collect()
    jax.clear_caches()


def _window(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--window-size: expected integers or 'auto', not {text!r}") from None


def _compare(
    options: argparse.Namespace,
    regimes: Regimes,
    rows: int,
    windows: Sequence[int | str],
) -> Iterator[list[Speed]]:
    """The comparisons at one number of rows."""
    from wedlm_jax.llm import LLM

    def llm(window: int | str) -> LLM:
        return LLM(options.model, window_size=window, max_batch_size=rows)

    count = options.prompts or max(PROMPTS_A_ROW * rows, 24)
    first = llm(options.fixed_window)
    work = mixed_lengths(first, regimes, count)
    if "batches" in options.compare:
        fixed: Ways = {
            f"fixed batches, W = {options.fixed_window}": (first, partial(_fixed, work, rows)),
            f"continuous, W = {options.fixed_window}": (first, partial(_continuous, work)),
        }
        yield measure(fixed, rows, count, options.passes)
    if "prefixes" in options.compare:
        shots = few_shot(first, regimes, count)
        prefixes: Ways = {
            f"{SHOTS} shots, each computed": (first, partial(_shared, shots, rows, False)),
            f"{SHOTS} shots, computed once": (first, partial(_shared, shots, rows, True)),
        }
        yield measure(prefixes, rows, count, options.passes)
    if "lengths" in options.compare and rows > 1:
        ways = _by_length(first, regimes, rows, count)
        if ways:
            yield measure(ways, rows, count, options.passes)
    if "windows" in options.compare:
        yield measure(_by_window(options, windows, llm, work), rows, count, options.passes)


def _by_window(
    options: argparse.Namespace,
    windows: Sequence[int | str],
    llm: Callable[[int | str], LLM],
    work: Sequence[Row],
) -> Ways:
    ways: Ways = {}
    for window in windows:
        model = llm(window)
        if window == 0:
            ways["AR"] = model, partial(_continuous, work)
            continue
        for mode in options.mode:
            name = f"W = {window}" if mode == "paper" else f"W = {window}, {mode}"
            of_mode = [(prompt, dataclasses.replace(p, mode=mode)) for prompt, p in work]
            ways[name] = model, partial(_continuous, of_mode)
    return ways


def _by_length(llm: LLM, regimes: Regimes, rows: int, count: int) -> Ways:
    """A few long prompts among short ones, in one kind of batch and in batches by length, whose
    caches are equally large; nothing where that holds no prompt of the model's context."""
    from wedlm_jax.batch_sizes import BatchSizes, largest_cache

    work = mixed_lengths(llm, regimes, count)
    long = few_shot(llm, regimes, count)
    for place in range(0, count, LONG_ONE_IN):
        work[place] = llm.prepare_one(long[place][0], work[place][1])
    alike = BatchSizes.for_rows(llm.engine, work, count=rows)
    tokens = alike.rows * alike.cache_size
    if tokens < largest_cache(llm.engine):
        return {}
    return {
        "rows alike": (llm, partial(_at_once, work, rows, None)),
        "rows of several lengths": (llm, partial(_at_once, work, MORE_ROWS * rows, tokens)),
    }


def mixed_lengths(llm: LLM, regimes: Regimes, count: int) -> list[Row]:
    """Questions of all regimes by turns, each with its own limit; the same every time."""
    import numpy as np

    from wedlm_jax.params import SamplingParams

    each = list(regimes.values())
    rng = np.random.default_rng(0)
    rows = []
    for i in range(count):
        regime = each[i % len(each)]
        question = regime[i // len(each) % len(regime)]
        limit = round(float(np.exp(rng.uniform(*np.log(LENGTHS)))))
        params = SamplingParams(max_tokens=limit, ignore_eos=True)
        prompt = llm.chat_prompt([{"role": "user", "content": question.prompt}])
        rows.append(llm.prepare_one(prompt, params))
    return rows


def few_shot(llm: LLM, regimes: Regimes, count: int) -> list[Row]:
    """Questions behind the same answered ones, with short answers: prefill is most of the work."""
    from wedlm_jax.params import SamplingParams

    questions = regimes.get("reasoning") or next(iter(regimes.values()))
    if len(questions) <= SHOTS:
        raise InputError(f"expected more than {SHOTS} questions of a regime, not {len(questions)}")
    header = []
    for question in questions[:SHOTS]:
        header.append({"role": "user", "content": question.prompt})
        header.append({"role": "assistant", "content": question.answer})
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    rows = []
    for i in range(count):
        asked = questions[SHOTS + i % (len(questions) - SHOTS)]
        prompt = llm.chat_prompt([*header, {"role": "user", "content": asked.prompt}])
        rows.append(llm.prepare_one(prompt, params))
    return rows


def _shared(work: Sequence[Row], rows: int, reuse: bool, llm: LLM) -> tuple[int, int]:
    """Continuously, with beginnings taken over from other rows or not."""
    from wedlm_jax.scheduler import Scheduler

    return _run(Scheduler(llm.engine, work, rows=rows, reuse_prefixes=reuse))


def _at_once(
    work: Sequence[Row], rows: int, max_cache_tokens: int | None, llm: LLM
) -> tuple[int, int]:
    """Continuously, nothing taken over, so many rows and tokens of cache at once."""
    from wedlm_jax.scheduler import Scheduler

    return _run(
        Scheduler(
            llm.engine, work, rows=rows, reuse_prefixes=False, max_cache_tokens=max_cache_tokens
        )
    )


def _run(scheduler: Scheduler) -> tuple[int, int]:
    tokens = forwards = 0
    for some in scheduler.run():
        for _, result in some:
            tokens += len(result.token_ids)
            forwards += result.num_forwards
    return tokens, forwards


def _fixed(work: Sequence[Row], rows: int, llm: LLM) -> tuple[int, int]:
    """As many prompts at a time as there are rows, in their order, each set to its end."""
    tokens = forwards = 0
    for start in range(0, len(work), rows):
        some = work[start : start + rows]
        batch = llm.engine.start([prompt for prompt, _ in some], [params for _, params in some])
        batch.advance()
        for result in batch.results():
            tokens += len(result.token_ids)
            forwards += result.num_forwards
    return tokens, forwards


def _continuous(work: Sequence[Row], llm: LLM) -> tuple[int, int]:
    tokens = forwards = 0
    for some in llm.run(work):
        for _, completion in some:
            tokens += len(completion.token_ids)
            forwards += completion.num_forwards
    return tokens, forwards


def measure(ways: Ways, rows: int, prompts: int, passes: int) -> list[Speed]:
    """Runs each way once, and then all of them by turns. Compiling counts for nothing."""
    made = {name: run(llm) for name, (llm, run) in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(passes):
        for name, (llm, run) in ways.items():
            compiled, started = llm.engine.compile_seconds, time.perf_counter()
            run(llm)
            compiling = llm.engine.compile_seconds - compiled
            seconds[name].append(time.perf_counter() - started - compiling)
    return [Speed(name, rows, prompts, *made[name], seconds[name]) for name in ways]
