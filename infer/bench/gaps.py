"""What the device waits for the host between bursts of forwards, and what short bursts cost.

Three ways to decode the same prompts: in long bursts, as jobs do; in short ones, each submitted
before the one before it has ended, as streams and the server do; and in short ones by turns with
the host. The last two differ by what planning ahead hides.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from infer.bench.subject import Subject
from infer.bench.windows import name_of, ways_of
from infer.bench.work import Regimes, Work, long_answers
from wedlm_jax.benchmark import Bar, by_turns
from wedlm_jax.engine.burst import Burst, Report, Request
from wedlm_jax.llm import STREAM_SECONDS

if TYPE_CHECKING:
    from wedlm_jax.engine.engine import Engine

LONG, AHEAD, BY_TURNS = "long bursts", "short, ahead", "short, by turns"
SHORTEST = 3e-3
"""Seconds of a burst whose gap counts: nobody can hide the host behind shorter ones."""


@dataclasses.dataclass(frozen=True)
class Gap:
    """The time between bursts of one way to decode.

    Attributes:
      way: AR or a window, and how bursts follow one another.
      sequences: that decode together.
      seconds: of all prompts, pass by pass.
      bursts: per pass.
      waits: milliseconds that the device waits for the host after a burst, at most: median of all
        passes.
    """

    way: str
    sequences: int
    seconds: list[float]
    bursts: float
    waits: float


def compare_gaps(
    subject: Subject,
    regimes: Regimes,
    *,
    batch_sizes: Sequence[int],
    windows: Sequence[int | str],
    modes: Sequence[str],
    passes: int,
    bar: Bar,
) -> Iterator[list[Gap]]:
    """Measures one number of sequences after another."""
    bursts: dict[str, dict[str, Any]] = {
        LONG: {"ahead": True},
        AHEAD: {"ahead": True, "seconds": STREAM_SECONDS},
        BY_TURNS: {"seconds": STREAM_SECONDS},
    }
    for sequences in batch_sizes:
        ways = {}
        engines = {window: subject.engine(window, sequences) for window in windows}
        for window, mode in ways_of(list(engines), modes):
            work = long_answers(subject, regimes, sequences, mode)
            for name, options in bursts.items():
                way = f"{name_of(window, mode)}, {name}"
                ways[way] = partial(_decode, engines[window], work, options)
        made = by_turns(ways, passes, bar, f"{sequences} sequences")
        yield [_gap(way, sequences, some[1:]) for way, some in made.items()]


def _gap(way: str, sequences: int, passes: Sequence[tuple[float, int, list[float]]]) -> Gap:
    seconds, bursts, waits = zip(*passes, strict=True)
    every = [wait for some in waits for wait in some]
    median = statistics.median(every) * 1e3 if every else float("nan")
    return Gap(way, sequences, list(seconds), statistics.fmean(bursts), median)


def _decode(engine: Engine, work: Work, options: dict[str, Any]) -> tuple[float, int, list[float]]:
    """Returns the seconds of all prompts, the bursts, and the gaps after bursts that were not too
    short."""
    engine.scheduler.forget_prefixes()
    requests = [Request(number, prompt, params) for number, (prompt, params) in enumerate(work)]
    with _Watch(engine) as watch:
        started = time.perf_counter()
        engine.step(requests, **options)
        while engine.has_work:
            engine.step(**options)
        seconds = time.perf_counter() - started
    return seconds, watch.bursts, watch.waits


class _Watch:
    """Sees when bursts are submitted and whether the burst before was still running then.

    Attributes:
      bursts: so far.
      waits: seconds from the end of each burst of at least `SHORTEST` to the next, at most: where
        it ended unobserved, from when it was last seen running.
    """

    def __init__(self, engine: Engine):
        self._device = engine.device
        self.bursts, self.waits = 0, list[float]()
        self._last: Any = None
        self._seen_running = 0.0
        self._seconds: dict[int, float] = {}
        self._gaps: dict[int, float] = {}

    def __enter__(self) -> _Watch:
        self._submit, self._collect = self._device.submit, self._device.collect
        self._device.submit, self._device.collect = self.submit, self.collect  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self._device.submit, self._device.collect = self._submit, self._collect  # type: ignore[method-assign]
        self.waits = [gap for n, gap in self._gaps.items() if self._seconds[n] >= SHORTEST]

    def submit(self, burst: Burst) -> Any:
        last = self._last
        self._look(last)
        ticket = self._submit(burst)
        now = time.perf_counter()
        if last is not None:
            running = not last.fetched[0].is_ready()
            self._gaps[last.number] = 0.0 if running else now - self._seen_running
        self.bursts, self._last, self._seen_running = self.bursts + 1, ticket, now
        return ticket

    def collect(self, ticket: Any) -> Report:
        self._look(ticket)
        running = not ticket.fetched[0].is_ready()
        report = self._collect(ticket)
        if running and ticket is self._last:
            self._seen_running = time.perf_counter()  # it was waited for, and has just ended
        self._seconds[ticket.number] = report.seconds
        return report

    def _look(self, ticket: Any) -> None:
        if ticket is not None and ticket is self._last and not ticket.fetched[0].is_ready():
            self._seen_running = time.perf_counter()
