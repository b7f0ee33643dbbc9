"""Measures where the time of a run went, including restarts and repeated steps: its goodput.

Each attempt at a run counts seconds by what they were spent on; the remaining time is steps.
`time.json` in the run's folder keeps the attempts, so the shares are those of the whole run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from train.watch.records import Record
from wedlm_jax.host.atomic import write_json
from wedlm_jax.host.processes import is_first, say
from wedlm_jax.host.progress import clock

FILE = "time.json"
KINDS = ("start", "compile", "input", "checkpoint", "evaluation")
"""What time is spent on apart from steps. ``input`` is the time the host waited for batches."""
WRITE_EVERY_S = 30.0
WORDS = {
    "start": "starting",
    "compile": "compiling",
    "input": "waiting for input",
    "checkpoint": "saving states",
    "evaluation": "evaluations",
    "redone": "repeated steps",
    "restart": "between attempts and restarting",
}
"""What the last line calls shares whose names are not clear enough."""


@dataclasses.dataclass
class Attempt:
    """Describes one attempt at the run.

    Attributes:
      begun, seen: seconds since 1970 when it began and when this was last updated.
      first, last: completed steps at these two times.
      seconds: seconds spent, by kind (`KINDS`).
    """

    begun: float
    seen: float
    first: int
    last: int
    seconds: dict[str, float]

    @property
    def in_steps(self) -> float:
        return max(self.seen - self.begun - sum(self.seconds.values()), 0.0)


def shares(attempts: Sequence[Attempt]) -> Record:
    """Returns what the time since the first attempt began was spent on, as shares of 1.

    ``steps`` is the goodput: steps whose result was kept. ``redone`` are steps that a later
    attempt had to repeat, ``restart`` is the time between attempts and until the later ones
    had a state.
    """
    spent = dict.fromkeys(("steps", *KINDS, "redone", "restart"), 0.0)
    for number, attempt in enumerate(attempts):
        later = [one.first for one in attempts[number + 1 :]]
        done = attempt.last - attempt.first
        kept = max(min([attempt.last, *later]) - attempt.first, 0)
        part = kept / done if done else 0.0
        spent["steps"] += part * attempt.in_steps
        spent["redone"] += (1 - part) * attempt.in_steps
        for kind, seconds in attempt.seconds.items():
            spent["restart" if number and kind == "start" else kind] += seconds
        if number:
            spent["restart"] += max(attempt.begun - attempts[number - 1].seen, 0.0)
    total = max(sum(spent.values()), 1e-9)
    return {kind: seconds / total for kind, seconds in spent.items()}


class RunTime:
    """Measures the time of one attempt; created when it begins.

    Args:
      now: a clock in seconds since 1970.
    """

    def __init__(self, now: Callable[[], float] = time.time):
        self._now = now
        self._attempt = Attempt(now(), now(), 0, 0, dict.fromkeys(KINDS, 0.0))
        self._before: list[Attempt] = []
        self._path: Path | None = None
        self._written = self._read = 0.0
        self._steps, self._tokens, self._flops = 0, 0, 0.0
        self._at_reading = dict(self._attempt.seconds)

    @property
    def seconds(self) -> dict[str, float]:
        """Returns the seconds of this attempt, by kind."""
        return self._attempt.seconds

    @contextlib.contextmanager
    def spent(self, kind: str) -> Iterator[None]:
        """Counts the time of a block."""
        started = self._now()
        try:
            yield
        finally:
            self._attempt.seconds[kind] += self._now() - started

    def begin(self, output: Path, done: int) -> None:
        """Notes that training begins: the state is ready, and ``done`` steps are completed."""
        attempt = self._attempt
        attempt.first = attempt.last = done
        known = sum(attempt.seconds.values())
        attempt.seconds["start"] += self._now() - attempt.begun - known
        self._path, self._before = output / FILE, read_attempts(output / FILE)
        self._read, self._at_reading = self._now(), dict(attempt.seconds)

    def step(self, step: int, tokens: int, flops: float = 0.0) -> None:
        """Notes that ``step`` steps are completed or running; the newest has this many tokens and
        FLOP of the model."""
        self._steps += 1
        self._tokens += tokens
        self._flops += flops
        self._attempt.last = step

    def read(self, peak_flops: float | None = None) -> Record:
        """Returns ``step_seconds``, ``tokens_per_second`` and ``input_wait`` (share of the time)
        since the last reading, excluding checkpoints, evaluations and compiling; ``goodput`` of the
        run; and ``mfu`` if the devices' peak is known."""
        now, seconds = self._now(), self._attempt.seconds
        since = {kind: seconds[kind] - self._at_reading[kind] for kind in KINDS}
        trained = max(now - self._read - sum(since.values()) + since["input"], 1e-9)
        record = {
            "step_seconds": round(trained / max(self._steps, 1), 6),
            "tokens_per_second": round(self._tokens / trained, 1),
            "input_wait": round(since["input"] / trained, 4),
            "goodput": round(self.shares()["steps"], 4),
        }
        if peak_flops is not None:
            record["mfu"] = self._flops / trained / peak_flops
        self._steps, self._tokens, self._flops = 0, 0, 0.0
        self._read, self._at_reading = now, dict(seconds)
        return record

    def shares(self) -> Record:
        """Returns the `shares` of the run so far; from time to time writes the attempts, too."""
        self._attempt.seen = self._now()
        if self._attempt.seen - self._written > WRITE_EVERY_S:
            self.write()
        return shares([*self._before, self._attempt])

    def write(self) -> None:
        """Writes the attempts to the run's folder."""
        self._attempt.seen = self._written = self._now()
        if self._path is not None and is_first():
            write_json(self._path, [dataclasses.asdict(a) for a in (*self._before, self._attempt)])

    def close(self) -> None:
        """Writes the attempts, and prints where the time went."""
        self.write()
        whole = clock(self._attempt.seen - [*self._before, self._attempt][0].begun)
        of = f", {len(self._before) + 1} attempts" if self._before else ""
        known = {kind: part for kind, part in self.shares().items() if part >= 0.001}
        parts = [f"{WORDS.get(kind, kind)} {part:.1%}" for kind, part in known.items()]
        say(f"time since the run began ({whole}{of}): {', '.join(parts)}")


def read_attempts(path: Path) -> list[Attempt]:
    """Reads earlier attempts at a run; returns none if the file is missing or damaged."""
    try:
        return [Attempt(**one) for one in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
