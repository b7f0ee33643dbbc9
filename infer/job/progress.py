"""How far a file job is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from infer.job.result_rows import Counts

PLAIN_INTERVAL = 5.0
"""Seconds between two lines where there is no terminal."""


@dataclasses.dataclass(frozen=True)
class Standing:
    """A job at one moment; all but ``rows`` and ``earlier`` are of this run alone.

    Attributes:
      rows: finished, those of earlier runs included.
      earlier: finished by earlier runs.
      total: rows that this process has to see to.
      tokens, forwards: of finished and running rows.
      finished: sums over finished rows.
      seconds: wall-clock since decoding began, without compilation.
      compile_seconds: that.
    """

    rows: int
    earlier: int
    total: int
    tokens: int
    forwards: int
    finished: Counts
    seconds: float
    compile_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.forwards, 1)

    @property
    def seconds_left(self) -> float | None:
        """If the remaining rows take as long as those of this run; None before the first."""
        finished = self.rows - self.earlier
        return self.seconds * (self.total - self.rows) / finished if finished else None

    def as_json(self) -> dict[str, Any]:
        """What `stats.json` says of a run."""
        return {
            **self.finished.as_json(),
            "seconds": round(self.seconds, 2),
            "compile_seconds": round(self.compile_seconds, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }

    def speed(self) -> str:
        """The p_cache is of finished rows alone, and absent before the first."""
        known = self.finished.num_token_instances > 0
        return (
            f"{self.tokens_per_second:,.0f} tokens/s, "
            f"{self.tokens_per_forward:.2f} tokens per forward"
            + (f", p_cache {self.finished.p_cache:.2f}" if known else "")
        )

    def line(self) -> str:
        left = clock(self.seconds_left)
        errors = self.finished.error_rows
        bad = f" ({errors:,} bad)" if errors else ""
        return f"{self.rows:,} of {self.total:,} rows{bad}, {self.speed()}, {left} left"


def clock(seconds: float | None) -> str:
    """A duration as 0:07, 12:34 or 1:02:03; "?" where it is not known."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[Standing], None]]:
    """Yields what to tell where the job stands, as often as one likes."""
    if not console.is_terminal:
        last = time.monotonic()

        def line_now_and_then(standing: Standing) -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_INTERVAL:
                last = time.monotonic()
                console.print(standing.line(), markup=False)

        yield line_now_and_then
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows  {task.fields[speed]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None, speed="compiling ...")

        def move(standing: Standing) -> None:
            speed = f"{standing.speed()}  {clock(standing.seconds_left)} left"
            bar.update(task, total=standing.total, completed=standing.rows, speed=speed)

        yield move
