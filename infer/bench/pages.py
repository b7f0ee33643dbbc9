"""How much of what is computed and kept is real, with prompts and completions of mixed lengths."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infer.bench.subject import Subject
from infer.bench.windows import name_of, ways_of
from infer.bench.work import Regimes, Work, mixed
from wedlm_jax.benchmark import Bar
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.events import Failed

if TYPE_CHECKING:
    from wedlm_jax.engine.engine import Engine

TIMES = 4
"""Requests for each place; and places for each rectangle of the same memory."""


@dataclasses.dataclass(frozen=True)
class PageUse:
    """Holds what was used while sequences waited, so that every place that could be taken was.

    Attributes:
      way: AR, or a window in a mode.
      sequences: places.
      useful: share of computed tokens that are real.
      held: share of the places in allocated pages that hold final keys and values.
      written: the same, with those that the next forward writes: spans of windows.
      rectangles: sequences that would fit into a small memory if each had the pages of the
        longest request and its window.
      fitting: sequences that ran in that memory at a time, mean over forwards.
      preemptions: sequences that were put back there for want of pages.
    """

    way: str
    sequences: int
    useful: float
    held: float
    written: float
    rectangles: int
    fitting: float
    preemptions: int

    @property
    def gain(self) -> float:
        return self.fitting / self.rectangles


@dataclasses.dataclass(frozen=True)
class _Look:
    """The engine after a burst: its forwards, tokens, and where the pages stood."""

    forwards: int
    tokens: int
    computed: int
    running: int
    places: int
    held: int
    written: int


def compare_pages(
    subject: Subject,
    regimes: Regimes,
    *,
    batch_sizes: Sequence[int],
    windows: Sequence[int],
    modes: Sequence[str],
    bar: Bar,
) -> Iterator[list[PageUse]]:
    """Measures each way at each number of sequences."""
    for sequences in batch_sizes:
        ways = ways_of(windows, modes)
        bar.expect(2 * len(ways))
        made = []
        for window, mode in ways:
            work = mixed(subject, regimes, TIMES * sequences, mode)
            name = name_of(int(window), mode)
            longest = max(len(prompt) + params.max_tokens for prompt, params in work)
            ample = subject.engine(window, sequences, max_model_len=longest)
            bar.begin(f"{sequences} sequences · {name}")
            looks, _ = _watch(ample, work)
            bar.begin(f"{sequences} sequences · {name}, in little memory")
            rectangles = max(sequences // TIMES, 1)
            small = subject.engine(
                window,
                sequences,
                max_model_len=longest,
                num_pages=1 + rectangles * ample.settings.max_pages,
            )
            tight, preemptions = _watch(small, work)
            made.append(
                PageUse(
                    name,
                    sequences,
                    useful=_share(looks, "tokens", "computed"),
                    held=_share(looks, "held", "places"),
                    written=_share(looks, "written", "places"),
                    rectangles=rectangles,
                    fitting=_mean_running(tight),
                    preemptions=preemptions,
                )
            )
        yield made


def _watch(engine: Engine, work: Work) -> tuple[list[_Look], int]:
    """Decodes the work, all of it there from the start; looks after each burst in which somebody
    waited. Returns the looks, and how often sequences were put back."""
    events = engine.step([Request(number, *one) for number, one in enumerate(work)], max_forwards=0)
    looks = []
    while engine.has_work:
        before = engine.device.counters.copy()
        events += engine.step()
        forwards, tokens, computed = (engine.device.counters - before).tolist()
        now = engine.counters
        if now.waiting:
            places = now.pages_used * engine.settings.page_size
            held = now.places_computed
            written = held + now.places_spanned
            looks.append(_Look(forwards, tokens, computed, now.running, places, held, written))
    for event in events:
        if isinstance(event, Failed):
            raise event.error
    return looks, engine.counters.preemptions


def _share(looks: Sequence[_Look], part: str, whole: str) -> float:
    parts = sum(getattr(look, part) for look in looks)
    return parts / max(sum(getattr(look, whole) for look in looks), 1)


def _mean_running(looks: Sequence[_Look]) -> float:
    if not looks:
        return 0.0
    return statistics.fmean([one.running for one in looks], [one.forwards for one in looks])
