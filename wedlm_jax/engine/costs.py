"""Estimates what a forward of each static size costs, and learns from the times of bursts.

A burst that runs r(s) forwards at each size s takes about

    overhead + Σ r(s) exp(c(s))

seconds. The logarithms c are Gaussian: all sizes share a level, which drifts with the machine's
load; neighbouring sizes have similar errors; each size has a small individual error; and the
program without room for windows, if there is one, has separate costs, whose ratio to the others
changes slowly with the size. A Kalman filter updates all of them from each burst. So a size that
runs also corrects the estimates of sizes that do not. The machine's load changes no ratio, so it
affects only the level.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wedlm_jax.host.compiled_cache import recalled, remember

KIND = "forward-costs"

Floats = np.ndarray
"""float64."""

OVERHEAD = 5e-4
"""Initial estimate of the seconds that a burst takes in addition to its forwards."""
SHARED, OWN, RATIO = 0.3, 0.1, 0.2
"""Standard deviations of logarithms: the error that neighbours share, a size's individual error,
and the ratio between the programs."""
NEIGHBOURS = 1.0
"""The length scale of shared errors, in log size: neighbours are within a factor of about e."""
UNKNOWN = 3.0
"""The factor by which these deviations are larger if nothing has been measured."""
NOISE = 0.1
"""Standard deviation of the logarithm of a burst's seconds."""
LEVEL_DRIFT, FORGETTING = 0.05, 1e-3
"""How far the level drifts from burst to burst, and how fast knowledge of ratios fades."""
USUAL, MOST = 2.5, 1.5
"""A time that is off by more than USUAL standard deviations is attributed to the level: the machine
was busy, or a program was compiled. MOST limits the surprise, as a logarithm."""


class CostTable:
    """Estimates the seconds of a forward.

    Args:
      sizes: the static sizes T of a forward, in any order.
      seconds: estimates for each size; None if nothing is known.
      windowless: cost of a forward in the program without windows, relative to one of the same size
        in the program with windows: a single number, or one per size.
      overhead: seconds that a burst takes in addition to its forwards.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float] | None = None,
        windowless: float | Sequence[float] = 1.0,
        overhead: float = OVERHEAD,
    ):
        order = np.argsort(sizes)
        self.sizes = np.asarray(sizes, np.int64)[order]
        count, self._places = len(sizes), np.log(self.sizes)
        guess = 1e-3 * (1 + self.sizes / 32) if seconds is None else np.array(seconds)[order]
        ratio = np.broadcast_to(np.asarray(windowless, np.float64), count)[order]
        self._logs = np.log([*guess, *(guess * ratio), overhead])
        near = np.exp(-(((self._places[:, None] - self._places) / NEIGHBOURS) ** 2) / 2)
        error = np.zeros((2 * count + 1, 2 * count + 1))
        error[:-1, :-1] = np.tile(SHARED**2 * near + OWN**2 * np.eye(count), (2, 2))
        error[count:-1, count:-1] += RATIO**2 * near
        error[-1, -1] = 0.5**2
        self._drift = FORGETTING * error + LEVEL_DRIFT**2
        self._drift[-1, -1] += LEVEL_DRIFT**2
        self._errors = error * (UNKNOWN**2 if seconds is None else 1.0) + 1.0
        self._weights: dict[tuple[int, ...], Floats] = {}
        self._update()

    @property
    def overhead(self) -> float:
        """The seconds that a burst takes in addition to its forwards."""
        return float(np.exp(self._logs[-1]))

    @property
    def level(self) -> float:
        """The geometric mean of all costs."""
        return float(np.exp(self._logs[:-1].mean()))

    def seconds(self, tokens: Floats | float, *, windowless: bool = False) -> Floats:
        """Returns the seconds of forwards with these token counts. Each runs at the smallest size
        that holds its tokens; beyond the largest size, it runs in parts."""
        largest, costs = self.sizes[-1], self._seconds[int(windowless)]
        whole = np.maximum(np.ceil(np.asarray(tokens) / largest) - 1, 0)
        found: Floats = costs[self.sizes.searchsorted(tokens - whole * largest)] + whole * costs[-1]
        return found

    def expected(self, tokens: Floats, spread: Floats) -> Floats:
        """Returns the expected seconds of forwards whose token counts vary by ``spread`` around an
        average: a forward that just fits into a size may not fit the next time."""
        each = tokens + spread * np.array([[-1.0], [0.0], [1.0]])
        mean: Floats = self.seconds(np.maximum(each, 1)).sum(axis=0) / 3
        return mean

    def doubt(self, tokens: float, without: float, *, windowless: bool) -> float:
        """Returns how uncertain the relative cost of windows is: the standard deviation of log(a/b)
        if a forward with windows takes a seconds and one without takes b.

        Args:
          tokens: token count of the forward with windows.
          without: token count of the forward without.
          windowless: whether the latter runs in the program without windows.
        """
        a, b = self.sizes.searchsorted(np.minimum([tokens, without], self.sizes[-1]))
        b += len(self.sizes) * windowless
        errors = self._errors
        return float(np.sqrt(max(errors[a, a] + errors[b, b] - 2 * errors[a, b], 0.0)))

    def of_sizes(self, sizes: Sequence[int], *, windowless: bool = False) -> Floats:
        """Returns the seconds of a forward at each of these sizes, which may differ from the
        table's."""
        found: Floats = self._at(tuple(sizes)) @ self._seconds[int(windowless)]
        return found

    def learn(
        self,
        sizes: Sequence[int],
        runs: np.ndarray,
        seconds: float,
        *,
        windowless: bool = False,
    ) -> None:
        """Learns from the time of a burst.

        Args:
          sizes: ``[S]``, static sizes of its program.
          runs: int ``[S]``, how many forwards ran at each size.
          seconds: duration of the whole burst.
          windowless: whether its program is the one without windows.
        """
        at, count = self._at(tuple(sizes)), len(self.sizes)
        part = slice(count, 2 * count) if windowless else slice(0, count)
        took = np.exp(at @ self._logs[part]) * runs
        expected = took.sum() + np.exp(self._logs[-1])
        # How the logarithm of the sum changes with each logarithm.
        slopes = np.zeros(len(self._logs))
        slopes[part] = took @ at
        slopes[-1] = expected - took.sum()
        slopes /= expected
        both = self._errors @ slopes
        variance = slopes @ both + NOISE**2
        surprise = min(max(np.log(max(seconds, 1e-9) / expected), -MOST), MOST)
        if surprise**2 > USUAL**2 * variance:
            self._errors += surprise**2
            both, variance = both + surprise**2, variance + surprise**2  # the slopes add up to 1
        self._logs += both * (surprise / variance)
        self._errors -= np.outer(both, both / variance)
        self._errors *= 1 - FORGETTING
        self._errors += self._drift
        self._update()

    def _update(self) -> None:
        self._seconds = np.exp(self._logs[:-1]).reshape(2, -1)

    def _at(self, sizes: tuple[int, ...]) -> Floats:
        """Returns how much each size of the table contributes to the logarithms of these sizes'
        costs."""
        if sizes not in self._weights:
            eye = np.eye(len(self.sizes))
            rows = [np.interp(np.log(sizes), self._places, row) for row in eye]
            self._weights[sizes] = np.stack(rows, axis=1)
        return self._weights[sizes]

    def as_json(self) -> dict[str, Any]:
        """Returns the arguments that recreate the table."""
        with_windows, without = np.exp(self._logs[:-1]).reshape(2, -1)
        return {
            "sizes": self.sizes.tolist(),
            "seconds": with_windows.tolist(),
            "windowless": (without / with_windows).tolist(),
            "overhead": self.overhead,
        }


def kept_table(
    folder: Path | None, key: Mapping[str, Any], measured: Callable[[], CostTable]
) -> CostTable:
    """Returns the table stored in a folder, or measures one and stores it.

    Args:
      folder: where tables are stored, such as JAX's folder of compiled programs; None stores
        nothing.
      key: everything that costs depend on: kind of device, model, dtype, sizes, versions.
      measured: function that measures a table.
    """
    with contextlib.suppress(TypeError, ValueError):  # missing or damaged: measured again
        return CostTable(**recalled(folder, KIND, key))
    table = measured()
    remember(folder, KIND, key, table.as_json())
    return table
