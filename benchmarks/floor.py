"""Compares the time of a forward with that of its linear layers and head alone, for the same number
of tokens; and measures what a prompt adds to its forwards. Times are in milliseconds."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.options import (
    SHAPES,
    add_decoding,
    long_answers,
    new_parser,
    random_prompts,
    random_subject,
)
from infer.bench.constants import milliseconds_of_products
from infer.bench.measure import Report, by_turns, milliseconds, table
from infer.bench.rival import RIVAL, RIVALS, Rival, check_rival
from infer.bench.speeds import Way, window_ways
from infer.bench.subject import Regimes, Subject, Work, load_subject, regimes_of
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Finished, Request
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import run_command
from wedlm_jax.params import SamplingParams

FORWARDS_OF_ONE, FORWARDS_OF_MANY = 64, 8
"""Forwards of a timed burst: with one sequence, and with several that decode autoregressively.
Several windows are timed one forward at a time, since their answers end after a few."""
PROMPT_ROOM = 64
"""Tokens per prompt that a forward has room for when there are several prompts."""
ANSWERS = 6
"""The fewest answers during which forwards are timed."""
SECONDS = 2.0
"""Time after which no further burst of a pass is timed."""
PROMPT_TOKENS, RANDOM_TOKENS, RANDOM_CONTEXT = 32, 160, 1024
"""Tokens of a random prompt, tokens after it, and the context length of random weights."""
RIVAL_TOKENS = 16
PROMPTS = 16
"""Requests whose prompts are timed, one after another."""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("floor", __doc__)
    add_decoding(parser, batch_size=[1, 8, 32], mode=["paper", "verified"])
    add = parser.add_argument
    meaning = "use random weights of this shape and random prompts instead"
    add("--shape", default=None, choices=tuple(SHAPES), help=meaning)
    add("--rival", default=None, choices=RIVALS, help="another library's AR on the same weights")
    options = parser.parse_args(arguments)
    if options.rival is not None:
        check_rival()
    report, given = Report(options.output), vars(options)
    regimes: Regimes | None = None
    if options.shape is not None:
        if "model" in options or "questions" in options:
            raise InputError("--shape uses random weights; leave out --model and --questions")
        subject = random_subject(options.shape, given)
    else:
        regimes = regimes_of(given)
        subject = load_subject(given)
    measure(options, subject, regimes, report)
    return 0


def measure(
    options: argparse.Namespace, subject: Subject, regimes: Regimes | None, report: Report
) -> None:
    """Measures forwards for each number of sequences, and for one sequence also prompts."""
    rival = None if options.rival is None else Rival(subject)
    ways = window_ways(options.window_size, options.mode)
    limits = {} if regimes is not None else {"max_model_len": RANDOM_CONTEXT}
    for sequences in options.batch_size:
        # Compute many prompts at once, or the first answers end before the last begin.
        chunk = PROMPT_ROOM * sequences if sequences > 1 else None
        engines = {
            window: subject.engine(window, sequences, chunk_tokens=chunk, **limits)
            for window in options.window_size
        }

        def work(way: Way, count: int) -> Work:
            return _work(subject, regimes, count, way.mode)

        runs: dict[str, Callable[[], Mapping[str, float]]] = {
            way.name: partial(
                _forward, engines[way.window], work(way, max(sequences, ANSWERS)), sequences
            )
            for way in ways
        }
        if rival is not None:
            asked = [prompt for prompt, _ in work(ways[0], sequences)]
            runs[RIVAL] = partial(_rival_forward, rival, asked)
        forwards = _rows(runs, options.passes, f"{sequences} sequences", sequences=sequences)
        for row in forwards:
            if floor := row.get("products alone, ms"):
                row["×"] = statistics.median(row["ms"]) / statistics.median(floor)
        report.add("floor", forwards, table("a forward", forwards))
        if sequences == 1:
            requests = {
                way.name: partial(_request, engines[way.window], work(way, PROMPTS)) for way in ways
            }
            prompts = _rows(requests, options.passes, "prompts")
            for row, forward in zip(prompts, forwards, strict=False):
                row["less a decode forward"] = statistics.median(row["ms"]) - statistics.median(
                    forward["ms"]
                )
            report.add("prompts", prompts, table("a request for one token", prompts))


def _rows(
    runs: Mapping[str, Callable[[], Mapping[str, float]]], passes: int, title: str, **more: Any
) -> list[dict[str, Any]]:
    """Runs by turns; returns a row for each way, with lists of what its passes returned."""
    return [
        {"way": name, **more, **{key: [one[key] for one in made[1:]] for key in made[0]}}
        for name, made in by_turns(runs, passes, title).items()
    ]


def _work(subject: Subject, regimes: Regimes | None, count: int, mode: str) -> Work:
    if regimes is not None:
        return long_answers(subject, regimes, count, mode)
    params = SamplingParams(mode=mode, max_tokens=RANDOM_TOKENS, ignore_eos=True)
    return [(prompt, params) for prompt in random_prompts(subject.config, count, PROMPT_TOKENS)]


def _rival_forward(rival: Rival, prompts: Sequence[list[int]]) -> Mapping[str, Any]:
    return {"ms": rival.milliseconds_per_token(prompts, RIVAL_TOKENS)}


def _forward(engine: Engine, work: Work, sequences: int) -> Mapping[str, float]:
    """Measures a forward while all sequences are decoding, including the host's share of bursts,
    and its floor."""
    engine.scheduler.forget_prefixes()
    seconds, counted = 0.0, np.zeros(3, np.int64)
    for start in range(0, len(work), sequences):
        batch = work[start : start + sequences]
        if seconds < SECONDS and len(batch) == sequences:
            more, counts = _forwards_amid(engine, batch)
            seconds, counted = seconds + more, counted + counts
    if not counted[0]:
        raise InputError("the completions end before a forward can be timed")
    forwards, tokens, computed = counted.tolist()
    return {
        "ms": seconds / forwards * 1e3,
        "products alone, ms": milliseconds_of_products(engine, max(round(tokens / forwards), 1)),
        "tokens": tokens / forwards,
        "computed": computed / forwards,
    }


def _forwards_amid(engine: Engine, work: Work) -> tuple[float, np.ndarray]:
    """Returns the seconds and the counts of bursts in which all sequences decode."""
    submitted = [Request(number, prompt, params) for number, (prompt, params) in enumerate(work)]
    prompts = math.ceil(sum(len(prompt) for prompt, _ in work) / engine.settings.chunk_tokens)
    events = engine.step(submitted, max_forwards=prompts)
    ended = any(isinstance(event, Finished) for event in events)
    many = 1 if engine.window_size else FORWARDS_OF_MANY
    forwards = FORWARDS_OF_ONE if len(work) == 1 else many
    seconds, counted = 0.0, np.zeros(3, np.int64)
    while not ended and seconds < SECONDS:
        before, started = engine.device.counters.copy(), time.perf_counter()
        events = engine.step(max_forwards=forwards)
        passed = time.perf_counter() - started
        ended = any(isinstance(event, Finished) for event in events)
        # After one of several has finished, forwards have fewer sequences.
        if not ended or len(work) == 1 or forwards == 1:
            seconds, counted = seconds + passed, counted + engine.device.counters - before
    engine.step(aborted=range(len(work)), max_forwards=0)
    return seconds, counted


def _request(engine: Engine, work: Work) -> Mapping[str, float]:
    """Measures a request for one token, alone, with nothing of its prompt cached. What it takes
    beyond a decode forward is the fixed cost of a prompt, whose one forward chooses the token."""
    times = []
    for number, (prompt, params) in enumerate(work):
        one = Request(number, prompt, dataclasses.replace(params, max_tokens=1))
        engine.decode([one])  # compiles whatever is not compiled yet
        engine.scheduler.forget_prefixes()
        times.append(milliseconds(partial(engine.decode, [one])))
    tokens = statistics.fmean(len(prompt) for prompt, _ in work)
    return {"tokens": tokens, "ms": statistics.median(times)}


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.floor", lambda: main(sys.argv[1:])))
