"""Shows progress: the state of a decoding call, the bar of all commands, and a line while something
takes long."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wedlm_jax.host.notices import through_bar
from wedlm_jax.host.processes import is_first

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a call that decodes many prompts, over finished and running sequences.

    Attributes:
      finished: number of finished prompts.
      total: number of prompts; None if they come from an iterator.
      tokens, forwards, instances: completion tokens, decode forwards and active window slots.
    """

    finished: int
    total: int | None
    tokens: int
    forwards: int
    instances: int


STILL = 12
"""How many times longer a line waits if it repeats the one before."""


class ProgressBar:
    """Shows how much is done, how fast, and how long the rest takes: a bar in a terminal, a line
    now and then elsewhere. A context manager.

    Args:
      unit: what is counted, such as "records".
      total: the total count; None while it is unknown.
      done: the count before this bar began, which does not affect the rate.
      title: shown before the bar.
      console: where it is shown; by default on standard error.
      every: seconds between two lines if there is no terminal; None for no lines.
      percent: whether to show the share that is done instead of a count.
    """

    def __init__(
        self,
        unit: str,
        *,
        total: int | None = None,
        done: int = 0,
        title: str = "",
        console: Console | None = None,
        every: float | None = 5.0,
        percent: bool = False,
    ):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._open = contextlib.ExitStack()
        self._unit, self._every, self._percent = unit, every, percent
        self._total, self._first, self._done = total, done, done
        self._shown: tuple[str | None, float | None] = None, None
        self._rate = 0.0
        """The rate by the caller's last estimate of the time left; 0 without one."""
        self._console = console or Console(stderr=True, soft_wrap=True)
        self._rich = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[line]}", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
            # What goes into a file stays out of the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._rich.add_task(title, total=total, completed=done, line="")
        self._started = self._told = time.monotonic()
        self._last = ""

    def start(self) -> None:
        """Shows the bar and starts the clock. What is printed meanwhile appears above it."""
        self._open.enter_context(through_bar(self._rich))
        self._started = self._told = time.monotonic()

    def stop(self) -> None:
        """Leaves the bar as it stands."""
        self._open.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def update(
        self,
        done: int,
        *,
        total: int | None = None,
        text: str | None = None,
        title: str | None = None,
        seconds_left: float | None = None,
    ) -> None:
        """Reports progress; may be called at any rate.

        Args:
          done: the count so far, including what was done before the bar began.
          total: the total count, if it was unknown or has changed.
          text: what else is shown; by default the rate.
          title: replaces the previous title.
          seconds_left: an estimate that is better than the rate so far; infinite for "unknown".
        """
        self._done, self._total = done, self._total if total is None else total
        self._shown = text, seconds_left
        line = self.line(text, seconds_left)
        self._rich.update(
            self._task, completed=done, total=self._total, line=line, description=title
        )
        now = time.monotonic()
        if not self._rich.disable or self._every is None or now - self._told < self._every:
            return
        if line == self._last and now - self._told < STILL * self._every:
            return  # while a program compiles, say
        self._told, self._last = now, line
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def move(self, done: int) -> None:
        """Moves the bar in a terminal; the text next to it stays until the next `update`."""
        self._done = done
        self._rich.update(self._task, completed=done, line=self.line(*self._shown))

    def advance(self, *, title: str | None = None) -> None:
        """Counts one more as done."""
        self.update(self._done + 1, title=title)

    @contextlib.contextmanager
    def saying(self, text: Callable[[float], str]) -> Iterator[None]:
        """Shows, after the count, what the block has been doing for this many seconds: in the bar,
        or without one like `saying`."""

        def line(seconds: float) -> str:
            return self.line(text(seconds), math.inf)

        if self._rich.disable:
            with saying(line, self._console):
                yield
            return
        with ticking(lambda seconds: self._rich.update(self._task, line=line(seconds))):
            yield
        self._rich.update(self._task, line=self.line(*self._shown))

    @contextlib.contextmanager
    def while_busy(self, what: str) -> Iterator[None]:
        """Shows what the work waits for, with the time so far: in the bar, or without one like
        `BusyNotice`."""
        noted = BusyNotice(console=self._console)(what)
        with noted if self._rich.disable else self.saying(so_far(what)):
            yield

    def line(self, text: str | None = None, seconds_left: float | None = None) -> str:
        """Returns the text next to the bar: "60 of 100 records, 2.5 records/s, 0:16 left"."""
        elapsed = time.monotonic() - self._started
        new = self._done - self._first
        left, rate = (self._total or 0) - self._done, new / max(elapsed, 1e-9)
        if seconds_left is None:
            known = self._total is not None and new > 0
            seconds_left = left / rate if known else math.inf
        elif seconds_left < math.inf:
            # The caller's estimate may exclude time such as compiling; the rate must agree with it.
            if left > 0 and seconds_left > 0:
                self._rate = left / seconds_left
            rate = self._rate or rate
        parts = [self._count(), text or f"{rate:,.1f} {self._unit}/s"]
        if self._done != self._total and math.isfinite(seconds_left):
            parts.append(f"{clock(seconds_left)} left")
        return ", ".join(parts)

    def _count(self) -> str:
        if self._total is None:
            return f"{self._done:,} {self._unit}"
        if self._percent:
            return f"{self._done / max(self._total, 1):.1%}"
        return f"{self._done:,} of {self._total:,} {self._unit}"


SHOWN_S, FIRST_LINE_S, NEXT_LINE_S = 0.5, 2.0, 8.0
"""Seconds until a slow task is first shown in a terminal; until its first line elsewhere; and
between two lines there."""


@contextlib.contextmanager
def saying(
    text: Callable[[float], str],
    console: Console | None = None,
    before: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], float]]:
    """Shows what the block does if it takes long: a line that counts the seconds in a terminal;
    elsewhere a line after a few seconds, and one now and then.

    Args:
      text: returns what to show after this many seconds.
      console: where it is shown; by default on standard error.
      before: called once before anything is shown, in any thread.

    Yields:
      a function that returns the seconds since the block began.
    """
    from rich.console import Console

    console = console or Console(stderr=True, highlight=False)
    status = console.status("") if console.is_terminal else None
    due, started = FIRST_LINE_S if status is None else SHOWN_S, time.monotonic()
    first = True

    def tell(seconds: float) -> None:
        nonlocal due, first
        if seconds < due:
            return
        if first:
            first = False
            before()
            if status is not None:
                shown.enter_context(through_bar(status))
        if status is not None:
            status.update(text(seconds))
        else:
            due = seconds + NEXT_LINE_S
            console.print(text(seconds), markup=False, soft_wrap=True)

    # The line in a terminal is removed only when no thread writes to it any more.
    with contextlib.ExitStack() as shown, ticking(tell, SHOWN_S):
        yield lambda: time.monotonic() - started


def saying_once(what: str) -> AbstractContextManager[object]:
    """Shows ``what`` the block does, as `saying` does, once in a job of several processes."""
    if not is_first():
        return contextlib.nullcontext()
    return saying(so_far(what))


COMPILING, LOADING = "compiling a program", "loading a compiled program"
MEASURING = "measuring what forwards cost"
"""What work may wait for."""


class BusyNotice:
    """Reports on standard error what work waits for, such as a program that is compiled: a line
    that counts the seconds in a terminal; elsewhere a line after a few seconds, and one now and
    then. After compiling there is one more.

    Args:
      kept: where programs are kept for the next time; None if nowhere.
      console: where it is shown; by default on standard error.

    Attributes:
      before: called before anything is shown; it may end a line that is being written.
    """

    def __init__(self, kept: Path | None = None, console: Console | None = None):
        self._kept, self._console = kept, console
        self.before: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Reports while the block waits for ``what``."""
        from rich.console import Console

        console = self._console or Console(stderr=True, highlight=False)
        with saying(so_far(what), console, lambda: self.before()) as elapsed:
            yield
        if what == COMPILING and (seconds := elapsed()) >= FIRST_LINE_S:
            where = f"; kept for the next time in {self._kept}" if self._kept else ""
            line = f"compiled a program in {seconds:.0f} s{where}"
            console.print(line, markup=False, soft_wrap=True)


def so_far(what: str) -> Callable[[float], str]:
    """Returns a function from seconds to the text that ``what`` is still in progress."""
    return lambda seconds: f"{what}, {seconds:.0f} s so far"


@contextlib.contextmanager
def ticking(tell: Callable[[float], None], every: float = 1.0) -> Iterator[None]:
    """Calls ``tell`` with the seconds since the block began, at once and then repeatedly until it
    ends, from a separate thread: the block itself may be busy in the compiler."""
    started, over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not over.wait(every):
            tell(time.monotonic() - started)

    tell(0.0)
    thread = threading.Thread(target=tick, name="ticking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def clock(seconds: float) -> str:
    """Returns a duration as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
