"""Times how long the device waits for the host between bursts, and what short bursts and a grammar
cost.

Four ways to decode the same prompts: in long bursts, as jobs do; in short ones, each submitted
before the previous one has ended, as streams and the server do; in short ones in turns with the
host; and under a grammar that allows every text, so that tokens are the same. The difference
between the second and the third is what planning ahead hides. Under a grammar, gaps between a
forward's layers and the rest of it are not counted.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.options import add_decoding, long_answers, new_parser
from infer.bench.measure import Report, by_turns, table
from infer.bench.speeds import window_ways
from infer.bench.subject import Work, load_subject, regimes_of
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Burst, Finished, Request
from wedlm_jax.engine.interface import Report as BurstReport
from wedlm_jax.host.command_line import run_command
from wedlm_jax.llm import STREAM_SECONDS

SHORTEST = 3e-3
"""The fewest seconds of a burst whose gap counts: shorter ones cannot hide the host."""
GRAMMAR, ANY_TEXT = "a grammar", r"(?s:.*)"


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("gaps", __doc__)
    add_decoding(parser, batch_size=[1, 8, 32], mode=["verified"])
    options = parser.parse_args(arguments)
    report, regimes = Report(options.output), regimes_of(vars(options))
    subject = load_subject(vars(options))
    bursts: dict[str, dict[str, Any]] = {
        "long bursts": {"ahead": True},
        "short, ahead": {"ahead": True, "seconds": STREAM_SECONDS},
        "short, by turns": {"seconds": STREAM_SECONDS},
        GRAMMAR: {"ahead": True},
    }
    for sequences in options.batch_size:
        engines = {window: subject.engine(window, sequences) for window in options.window_size}
        rows: list[dict[str, Any]] = []
        for way in window_ways(options.window_size, options.mode):
            work = long_answers(subject, regimes, sequences, way.mode)
            ruled = [(prompt, dataclasses.replace(one, regex=ANY_TEXT)) for prompt, one in work]
            runs = {
                f"{way.name}, {name}": partial(
                    decode, engines[way.window], ruled if name == GRAMMAR else work, how
                )
                for name, how in bursts.items()
            }
            made = by_turns(runs, options.passes, f"{sequences} sequences")
            new = [_row(name, sequences, some[1:]) for name, some in made.items()]
            long = statistics.median(new[0]["ms"])
            rows += [row | {"× long bursts": statistics.median(row["ms"]) / long} for row in new]
        report.add("gaps", rows, table("bursts", rows))
    return 0


def _row(
    way: str, sequences: int, passes: Sequence[tuple[float, int, int, Sequence[float]]]
) -> dict[str, Any]:
    seconds, tokens, bursts, waits = zip(*passes, strict=True)
    return {
        "way": way,
        "sequences": sequences,
        "tokens": tokens[0],
        "ms": [one * 1e3 for one in seconds],
        "bursts": statistics.fmean(bursts),
        "the device waits, ms": [wait * 1e3 for some in waits for wait in some],
    }


def decode(
    engine: Engine, work: Work, how: Mapping[str, Any]
) -> tuple[float, int, int, Sequence[float]]:
    """Decodes all prompts; returns the seconds, the tokens, the bursts, and the gaps after bursts
    of at least `SHORTEST`."""
    engine.scheduler.forget_prefixes()
    requests = [Request(number, prompt, params) for number, (prompt, params) in enumerate(work)]
    with _Watch(engine) as watch:
        started = time.perf_counter()
        events = engine.step(requests, **how)
        while engine.has_work:
            events += engine.step(**how)
        seconds = time.perf_counter() - started
    tokens = sum(len(one.result.token_ids) for one in events if isinstance(one, Finished))
    return seconds, tokens, watch.bursts, watch.waits


class _Watch:
    """Records when bursts are submitted and whether the previous one was still running then.

    Attributes:
      bursts: number submitted so far.
      waits: seconds from the end of each burst of at least `SHORTEST` to the next; an upper bound
        where the end was not observed, counted from when the burst was last seen running.
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

    def collect(self, ticket: Any) -> BurstReport:
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


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.gaps", lambda: main(sys.argv[1:])))
