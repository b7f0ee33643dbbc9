"""The cost of a forward by the number of its tokens: measured at start, corrected while decoding.

Only the ratios between sizes matter for choosing windows. So the correction separates what slows
down all sizes alike, such as other work of the machine, from errors of single sizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import write_json

Floats = np.ndarray
"""float64."""

ROUNDS = 5
"""How often each size is measured, in rounds over all sizes."""
MEASURE_SECONDS = 0.6
"""No new round starts after so long."""
NEIGHBOURS = 0.6
"""Sizes within a factor of exp(NEIGHBOURS) are neighbours."""
OVERHEAD = 5e-4
"""Seconds that a burst takes beside its forwards, if not measured."""
LEVEL_RATE, SIZE_RATE = 0.3, 0.03
"""The shares of a surprise that are attributed to all sizes, and to the one that ran."""
MOST_SURPRISE = 0.3
"""Caps the logarithm of a burst's time over the expected time, which compiling would exceed."""


class CostTable:
    """Seconds of a forward.

    Args:
      sizes: the static sizes T of a forward, in any order.
      seconds: of each.
      overhead: seconds that a burst of forwards takes beside them.
      windowless: what a forward costs while no sequence has a window, against one of as many tokens
        with windows: its program has no room for any.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        overhead: float = OVERHEAD,
        windowless: float = 1.0,
    ):
        order = np.argsort(sizes)
        self.sizes = np.asarray(sizes, np.int64)[order]
        self.measured: Floats = _monotone(np.asarray(seconds, np.float64)[order])
        self.overhead, self.windowless = overhead, windowless
        self._level, self._errors = 0.0, np.zeros(len(self.sizes))
        self._seconds = self.measured

    def seconds(self, tokens: Floats) -> Floats:
        """Returns the seconds of forwards of so many tokens, on the machine as it was measured: the
        cost of the smallest size that holds them. Beyond the largest, forwards run in parts."""
        largest = float(self.sizes[-1])
        whole = np.maximum(np.ceil(tokens / largest) - 1, 0)
        index = self.sizes.searchsorted(tokens - whole * largest)
        found: Floats = self._seconds[index] + whole * self._seconds[-1]
        return found

    def expected(self, tokens: Floats, spread: Floats) -> Floats:
        """Returns the expected seconds of forwards whose tokens vary by ``spread`` around an
        average: what just fits into a size may not fit the next time."""
        each = np.asarray(tokens)[..., None] + np.asarray(spread)[..., None] * [-1, 0, 1]
        mean: Floats = self.seconds(np.maximum(each, 1)).mean(axis=-1)
        return mean

    def observe(
        self,
        tokens: float,
        spread: float,
        prompt: float,
        chunks: float,
        forwards: int,
        seconds: float,
        *,
        windowless: bool = False,
    ) -> None:
        """Learns from the time of a burst.

        Args:
          tokens, spread: of windows in each of its forwards, as for `expected`.
          prompt, chunks: tokens of prompts beside them, and in how many of the forwards.
          forwards, seconds: of the whole burst.
          windowless: whether no sequence had a window.
        """
        plain = forwards - chunks
        each = np.array([tokens, tokens + prompt / max(chunks, 1)])
        took = self.expected(each, np.array(spread)) * [plain, chunks]
        if windowless:
            took *= self.windowless
        surprise = self._surprise(took, seconds)
        if windowless:
            self.windowless *= float(np.exp(SIZE_RATE * surprise))
        else:
            self._correct(each, surprise * took / took.sum())

    def learn(self, sizes: Sequence[int], runs: np.ndarray, seconds: float) -> None:
        """Learns from the time of a burst whose forwards are known.

        Args:
          sizes: ``[S]``, that forwards ran at.
          runs: int ``[S]``, how often.
          seconds: of the whole burst.
        """
        each = np.array(sizes)
        took = self.seconds(each) * runs
        if took.sum():
            self._correct(each, self._surprise(took, seconds) * took / took.sum())

    def _surprise(self, took: Floats, seconds: float) -> float:
        """Returns the logarithm of a burst's time over what was expected, less what slows down all
        sizes alike."""
        surprise = np.log(seconds / (took.sum() * np.exp(self._level) + self.overhead))
        surprise = float(np.clip(surprise, -MOST_SURPRISE, MOST_SURPRISE))
        self._level += LEVEL_RATE * surprise
        return surprise

    def _correct(self, tokens: Floats, shares: Floats) -> None:
        """Attributes the shares of a surprise to the sizes that hold so many tokens."""
        index = np.minimum(self.sizes.searchsorted(tokens), len(self.sizes) - 1)
        np.add.at(self._errors, index, SIZE_RATE * shares)
        self._seconds = np.maximum.accumulate(self.measured * np.exp(self._errors))


def _monotone(seconds: Floats) -> Floats:
    """Returns the closest costs, in logarithms, that do not fall from one size to the next (pool
    adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in np.log(seconds):
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (one, n), (two, m) = pools[-2:]
            pools[-2:] = [((n * one + m * two) / (n + m), n + m)]
    return np.exp(np.repeat([value for value, _ in pools], [count for _, count in pools]))


def _smooth(places: Floats, seconds: Floats) -> Floats:
    """Moves costs half way to a line through their neighbours, in logarithms: other work of the
    machine may have slowed down a single one."""
    values, distance = np.log(seconds), places[:, None] - places
    weights = np.exp(-((distance / NEIGHBOURS) ** 2))
    weights /= weights.sum(axis=1, keepdims=True)
    middle, mean = weights @ places, weights @ values
    square = weights @ places**2 - middle**2
    slope = (weights @ (places * values) - middle * mean) / (square + 1e-9)
    smooth: Floats = np.exp((values + mean + slope * (places - middle)) / 2)
    return smooth


def measure(
    time_forward: Callable[[int], float],
    sizes: Sequence[int],
    *,
    reach: float = np.inf,
    overhead: Callable[[], float] | None = None,
    windowless: Callable[[], float] | None = None,
    beside: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measures a table: every size a few times, in rounds, so that other work of the machine
    meets all of them alike; the median counts, drawn to those of its neighbours.

    Args:
      time_forward: runs a forward of T tokens and returns its seconds; compiles nothing.
      sizes: the static sizes T, ascending.
      reach: tokens that a forward can be timed with, at most. Sizes that are not reached cost what
        those before them let expect.
      overhead: says afterwards what a burst takes beside its forwards; None where that was not
        measured.
      windowless: runs a forward of ``beside`` sequences without windows and returns its seconds;
        None where the program is the same.
    """
    started = clock()
    rounds: list[list[float]] = []
    ratios: list[float] = []
    timed = sizes[: int(np.searchsorted(sizes, reach)) + 1]
    while len(rounds) < ROUNDS and (not rounds or clock() - started < MEASURE_SECONDS):
        rounds.append([max(time_forward(size), 1e-9) for size in timed])
        if windowless is not None:
            ratios.append(max(windowless(), 1e-9) / max(time_forward(beside), 1e-9))
    ratio = float(np.clip(np.median(ratios), 0.5, 1.0)) if ratios else 1.0
    median = np.median(rounds, axis=0)
    if timed[0] == 1:
        median[0] /= ratio  # a forward of one token has no window
    seconds = _smooth(np.log(timed), median)
    seconds = np.append(seconds, _beyond(np.array(timed), seconds, np.array(sizes[len(timed) :])))
    measured = OVERHEAD if overhead is None else max(overhead(), 1e-5)
    return CostTable(sizes, seconds.tolist(), measured, ratio)


def _beyond(sizes: np.ndarray, seconds: Floats, larger: np.ndarray) -> Floats:
    """Extrapolates to ``larger`` sizes, on the line through those within a factor of 4 of the
    last."""
    last = sizes >= sizes[-1] / 4
    if last.sum() < 2:
        return seconds[-1] * larger / sizes[-1]
    slope = np.polyfit(sizes[last], seconds[last], 1)[0]
    found: Floats = seconds[-1] + max(slope, 0) * (larger - sizes[-1])
    return found


def kept_table(
    folder: Path | None, key: Mapping[str, Any], measured: Callable[[], CostTable]
) -> CostTable:
    """Returns the table stored in a folder, or measures one and stores it.

    Args:
      folder: such as that of JAX's compiled programs; None keeps nothing.
      key: all that costs depend on: kind of device, model, dtype, sizes, versions.
      measured: measures a table.
    """
    if folder is None:
        return measured()
    text = json.dumps(key, sort_keys=True, default=str)
    path = folder / f"forward-costs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] == json.loads(text):
            return CostTable(kept["sizes"], kept["seconds"], kept["overhead"], kept["windowless"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing or damaged: measured again
    table = measured()
    whole = {
        "key": json.loads(text),
        "sizes": table.sizes.tolist(),
        "seconds": table.measured.tolist(),
        "overhead": table.overhead,
        "windowless": table.windowless,
    }
    # A folder that cannot be written to only costs another measurement next time.
    with contextlib.suppress(OSError, InputError):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, whole)
    return table
