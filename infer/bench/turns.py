"""Timing by turns: A B C A B C ..., so that a busy machine slows all alike."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")


class Bar:
    """A progress bar that learns as it goes how much there is to do.

    Args:
      progress: where it is shown; None for nowhere.
    """

    def __init__(self, progress: Progress | None = None):
        self._progress = progress
        self._total = 0
        self._task = None if progress is None else progress.add_task("", total=0)

    def expect(self, steps: int) -> None:
        """Announces steps."""
        self._total += steps
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=self._total)

    def begin(self, name: str) -> None:
        """Names the step that begins; the one before it is done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, description=name)


def by_turns(
    ways: Mapping[str, Callable[[], T]], passes: int, bar: Bar, title: str
) -> dict[str, list[T]]:
    """Calls each way once, which compiles, and then all of them by turns.

    Returns:
      what each returned: first of the call that compiled, then of each pass.
    """
    bar.expect(len(ways) * (passes + 1))
    made: dict[str, list[T]] = {name: [] for name in ways}
    for _ in range(passes + 1):
        for name, run in ways.items():
            bar.begin(f"{title} · {name}")
            made[name].append(run())
    return made


@dataclasses.dataclass
class Stopwatch:
    """Seconds of wall-clock in the functions that it wraps, and how often they were called."""

    seconds: float = 0.0
    calls: int = 0

    def around(self, function: Callable[..., T]) -> Callable[..., T]:
        """The same function, timed."""

        def timed(*arguments: object, **named: object) -> T:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        return timed
