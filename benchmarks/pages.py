"""Measures how much of what is computed and stored is real, with prompts and completions of mixed
lengths.

Counted while sequences wait, so that every usable place is taken: the share of computed tokens that
are real ("useful"), and the shares of places in allocated pages that hold final keys and values
("held"), and including what the next forward writes ("with spans"). Then the same in the memory of
a few rectangles, each with the pages of the longest request and its window: how many sequences run
there at a time ("fitting"), and how many were put back for lack of pages.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.options import add_decoding, new_parser
from benchmarks.work import mixed
from infer.bench.measure import Report, status, table
from infer.bench.speeds import window_ways
from infer.bench.subject import Work, load_subject, regimes_of
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Failed, Request
from wedlm_jax.host.command_line import run_command

TIMES = 4
"""Requests per sequence of the batch, and sequences of the batch per rectangle of memory."""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("pages", __doc__, passes=None)
    add_decoding(parser, batch_size=[32], mode=["verified"])
    options = parser.parse_args(arguments)
    report, regimes = Report(options.output), regimes_of(vars(options))
    subject = load_subject(vars(options))
    for sequences in options.batch_size:
        rows: list[dict[str, Any]] = []
        for way in window_ways(options.window_size, options.mode):
            work = mixed(subject, regimes, TIMES * sequences, way.mode)
            longest = max(len(prompt) + params.max_tokens for prompt, params in work)
            with status(f"{sequences} sequences · {way.name}"):
                ample = subject.engine(way.window, sequences, max_model_len=longest)
                looks, _ = _watch(ample, work)
                rectangles = max(sequences // TIMES, 1)
                pages = 1 + rectangles * ample.settings.max_pages
                small = subject.engine(
                    way.window, sequences, max_model_len=longest, num_pages=pages
                )
                tight, preemptions = _watch(small, work)
            running, forwards = [one.running for one in tight], [one.forwards for one in tight]
            fitting = statistics.fmean(running, forwards) if tight else 0.0
            rows.append(
                {
                    "way": way.name,
                    "sequences": sequences,
                    "useful": _share(looks, "tokens", "computed"),
                    "held": _share(looks, "held", "places"),
                    "with spans": _share(looks, "written", "places"),
                    "rectangles": rectangles,
                    "fitting": fitting,
                    "×": fitting / rectangles,
                    "put back": preemptions,
                }
            )
        report.add("pages", rows, table("mixed lengths while others wait", rows))
    return 0


class _Look(NamedTuple):
    """Holds the counts of a burst, and how full the pages were after it."""

    forwards: int
    tokens: int
    computed: int
    running: int
    places: int
    held: int
    written: int


def _watch(engine: Engine, work: Work) -> tuple[list[_Look], int]:
    """Decodes the work, all submitted at the start, and takes a look after each burst that left
    sequences waiting. Returns the looks, and how often sequences were put back."""
    events = engine.step([Request(number, *one) for number, one in enumerate(work)], max_forwards=0)
    looks = []
    while engine.has_work:
        before = engine.device.counters.copy()
        events += engine.step()
        now = engine.counters
        if now.waiting:
            places = now.pages_used * engine.settings.page_size
            held = now.places_computed
            forwards, tokens, computed = (engine.device.counters - before).tolist()
            written = held + now.places_spanned
            looks.append(_Look(forwards, tokens, computed, now.running, places, held, written))
    for event in events:
        if isinstance(event, Failed):
            raise event.error
    return looks, engine.counters.preemptions


def _share(looks: Sequence[_Look], part: str, whole: str) -> float:
    parts = sum(getattr(look, part) for look in looks)
    return parts / max(sum(getattr(look, whole) for look in looks), 1)


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.pages", lambda: main(sys.argv[1:])))
