"""What `wedlm bench` and `python -m train.bench` have in common: one command line, timing by turns,
and figures as tables and JSON."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import check_writable, write_json
from wedlm_jax.host.command_line import CommandParser

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

T = TypeVar("T")


class BenchmarkParser(CommandParser):
    """The command line of a benchmark that compares several things.

    Every option is of some of the comparisons; given for others, it is refused. So options have no
    defaults of argparse: one that was not given is None.

    Args:
      comparisons: their names, and what each measures.
      default: what the help says is compared where nothing is named.
      closing: what the description says after them.
      examples: command lines.
    """

    def __init__(
        self,
        prog: str,
        comparisons: Mapping[str, str],
        *,
        default: str,
        closing: str,
        examples: Sequence[str],
    ):
        width = max(map(len, comparisons)) + 2
        indent = " " * (width + 2)
        lines = [
            f"  {name:<{width}}{meaning}".replace("\n", "\n" + indent)
            for name, meaning in comparisons.items()
        ]
        super().__init__(
            prog=prog,
            description="Measures on this machine; what is compared runs in one process and takes "
            "turns:\n\n" + "\n".join(lines) + "\n\n" + closing,
            epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]),
        )
        self._comparisons = tuple(comparisons)
        self._known_to: dict[str, tuple[str, ...]] = {}
        self.add_argument(
            "--compare",
            nargs="+",
            choices=tuple(comparisons),
            metavar="WHAT",
            help=f"one or more of the above [{default}]",
        )
        self.add_argument("--output", metavar="FILE", help="also write all figures as JSON")

    def add(self, flag: str, meaning: str, *, of: Sequence[str] = (), **settings: Any) -> None:
        """Adds an option of the comparisons ``of``; of all where there are none."""
        others = [name for name in self._comparisons if name not in of]
        if of and len(others) < len(of):
            meaning = f"all but {', '.join(others)}: {meaning}" if others else meaning
        elif of:
            meaning = f"{', '.join(of)}: {meaning}"
        action = self.add_argument(flag, help=meaning, **settings)
        self._known_to[action.dest] = tuple(of)

    def check(self, options: argparse.Namespace) -> None:
        """Refuses what is found out before anything is measured.

        Args:
          options: as parsed; its ``compare`` is a list, whether it was given or not.

        Raises:
          InputError: an option that no comparison of these knows, or no folder to write to.
        """
        if options.output is not None:
            check_writable(Path(options.output), "--output")
        for name, known_to in self._known_to.items():
            given = getattr(options, name) not in (None, False)
            if given and known_to and not set(known_to) & set(options.compare):
                raise InputError(
                    f"--{name.replace('_', '-')} is an option of {_and(known_to)}, "
                    f"not of {_and(options.compare)}"
                )


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures of a comparison.

    Attributes:
      name: under which the JSON file has the records.
      records: dataclasses.
      table: or a text that stands for itself; None for figures that are only written, such as
        those on the way.
      failure: where something was to be held and was not: what.
    """

    name: str
    records: Sequence[Any]
    table: Table | str | None = None
    failure: str | None = None


def report(compare: Callable[[Bar], Iterable[Outcome]], output: str | None) -> int:
    """Runs comparisons under a progress bar; prints and writes each outcome as it comes.

    Args:
      output: a JSON file, whole after every outcome.

    Returns:
      the exit status: 1 where an outcome has a failure.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    figures: dict[str, Any] = {"machine": machine()}
    columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn())
    console, status = Console(highlight=False, markup=False), 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for outcome in compare(Bar(progress)):
            records = [dataclasses.asdict(record) for record in outcome.records]
            figures.setdefault(outcome.name, []).extend(records)
            if output is not None:
                write_json(Path(output), figures)
            if outcome.table is not None:
                console.print(outcome.table, soft_wrap=isinstance(outcome.table, str))
            if outcome.failure is not None:
                print(outcome.failure, file=sys.stderr)
                status = 1
    return status


def machine() -> dict[str, Any]:
    """Describes the machine that figures were measured on."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "cores": num_cores(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def num_cores() -> int:
    """Counts the processor cores that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
        """Returns the same function, timed."""

        def timed(*arguments: object, **named: object) -> T:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1

        return timed
