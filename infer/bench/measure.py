"""Timing by turns, and figures as tables and JSON."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from wedlm_jax.host.atomic import check_writable, write_json
from wedlm_jax.host.progress import ProgressBar

T = TypeVar("T")

FILE_WIDTH = 150
"""Width, in characters, of tables that go to a file or a pipe: enough that no heading is cut."""


def status(title: str) -> Status:
    """Returns a context manager, with `update`, that shows progress in a terminal."""
    return Console(stderr=True, markup=False).status(title, refresh_per_second=2)


def by_turns(ways: Mapping[str, Callable[[], T]], passes: int, title: str) -> dict[str, list[T]]:
    """Calls each way once, which compiles, and then all of them in turn, once per pass.

    Every second pass goes backwards, so that no way gains or loses by always running right after
    the same other one.

    Returns:
      the results of each way: that of the call that compiled, then that of each pass.
    """
    made: dict[str, list[T]] = {name: [] for name in ways}
    forwards, backwards = list(ways), list(ways)[::-1]
    turns = [
        (number, name)
        for number in range(passes + 1)
        for name in (backwards if number % 2 else forwards)
    ]
    with ProgressBar("runs", total=len(turns), title=title) as bar:
        for done, (number, name) in enumerate(turns):
            bar.update(done, text=f"{name} {f'in pass {number}' if number else 'compiles'}")
            made[name].append(ways[name]())
        bar.update(len(turns), text="done")
    return made


def milliseconds(call: Callable[[], object]) -> float:
    """Times a call until the arrays that it returns are ready."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - started) * 1e3


class Report:
    """Prints tables and writes figures as they come.

    Args:
      output: a JSON file, complete after every addition; None for no file.
    """

    def __init__(self, output: str | None):
        if output is not None:
            check_writable(Path(output), "--output")
        self._output = output
        self._figures: dict[str, Any] = {"machine": machine()}
        width = None if sys.stdout.isatty() else FILE_WIDTH
        self._console = Console(highlight=False, markup=False, width=width)

    def add(self, name: str, records: Iterable[Any], shown: Table | str | None = None) -> None:
        """Writes records (dataclasses or mappings) under a name; prints ``shown``."""
        self._figures.setdefault(name, []).extend(
            dataclasses.asdict(one) if dataclasses.is_dataclass(one) else one  # type: ignore[arg-type]
            for one in records
        )
        if self._output is not None:
            write_json(Path(self._output), self._figures)
        if shown is not None:
            self._console.print(shown, soft_wrap=isinstance(shown, str))


def table(title: str, rows: Sequence[Mapping[str, Any]], caption: str | None = None) -> Table:
    """Makes a table of mappings. The keys of the first are the headings, a row's first value is its
    name, and a list is shown as its median."""
    made = Table(box=box.SIMPLE, title=title, caption=caption)
    for place, head in enumerate(rows[0]):
        shown = "" if head == "way" else head
        made.add_column(shown, justify="right" if place else "left", no_wrap=not place)
    for row in rows:
        made.add_row(*(_cell(row.get(head)) for head in rows[0]))
    return made


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = statistics.median(value) if value else None
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        digits = 2 - math.floor(math.log10(abs(value))) if value else 0
        return f"{value:,.{min(max(digits, 0), 4)}f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def machine() -> dict[str, Any]:
    """Describes the machine that figures were measured on."""
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
    """Counts the processor cores that this process may use, if the system reports them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
