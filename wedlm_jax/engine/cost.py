"""What a forward costs, by the number of its tokens.

Measured at start, and corrected while decoding. Only the ratios of sizes matter to who chooses
windows. So the correction keeps apart what slows down all sizes alike, such as other work on the
machine, and what was wrong about one of them: the first changes quickly and is of no consequence,
the second slowly.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Floats = np.ndarray
"""float64."""
ForwardTokens = np.ndarray
"""float64 ``[4, ..]``: the tokens of a forward, on average; their variance; and how few and how
many they may be. Those of sequences that decode together add up, all four."""

ROUNDS = 5
"""Times that each size is measured, one round behind the other."""
MEASURE_SECONDS = 0.6
"""No new round begins after so long."""

NEIGHBOURS = 0.6
"""Sizes within a factor of exp(NEIGHBOURS) are neighbours."""

ERROR = 0.2
"""Standard deviation of the logarithm of a measured cost: the texts of a job are longer or shorter
than those measured. Sizes close to each other err alike."""
OWN_ERROR = 0.04
"""The same of one size, its neighbours apart."""
ALIKE = 1.5
"""Sizes err alike within a factor of exp(ALIKE)."""
DRIFT = 0.001
"""How much of it a burst brings anew, as a standard deviation."""
LEVEL, LEVEL_DRIFT = 0.5, 0.06
"""The same two of what all sizes have in common."""
OVERHEAD = 5e-4
"""Seconds that a burst takes beside its forwards, where that was not measured."""
OVERHEAD_ERROR, OVERHEAD_DRIFT = 0.4, 0.003
NOISE = 0.08
"""Standard deviation of the logarithm of a burst's time, before that is known."""
LEAST_NOISE, MOST_NOISE = 0.02, 0.5
OUTLIER = 2.0
"""Standard deviations beyond which a time does not count for more."""
FAR_OUT, FAR_OUT_RUN = 5.0, 3
"""Standard deviations beyond which it does not count at all, as where something was compiled,
unless so many bursts in a row are like that."""


class CostTable:
    """Seconds of a forward.

    Args:
      sizes: the static sizes T of a forward, in any order.
      seconds: of each.
      overhead: seconds that a burst of forwards takes beside them.
    """

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], overhead: float = OVERHEAD):
        order = np.argsort(sizes)
        self.sizes = np.asarray(sizes, np.int64)[order]
        self.measured: Floats = _monotone(np.asarray(seconds, np.float64)[order])
        self.overhead = overhead
        self._filter = _Correction(np.log(self.sizes), overhead)
        self._largest = float(self.sizes[-1])
        self._update()

    def seconds(self, tokens: Floats) -> Floats:
        """Seconds of forwards of so many tokens, on the machine as it was measured: what the
        smallest size costs that holds them. More than the largest are computed in parts."""
        tokens = np.asarray(tokens, np.float64)
        if tokens.max(initial=0.0) <= self._largest:
            near: Floats = self._seconds[self.sizes.searchsorted(tokens)]
            return near
        whole = np.maximum(np.ceil(tokens / self._largest) - 1, 0)
        index = self.sizes.searchsorted(tokens - whole * self._largest)
        found: Floats = self._seconds[index] + whole * self._seconds[-1]
        return found

    def expected(self, tokens: ForwardTokens) -> Floats:
        """Seconds of a forward on average, where its number of tokens varies."""
        few, many, share = _two_sizes(tokens)
        mean: Floats = (1 - share) * self.seconds(few) + share * self.seconds(many)
        return mean

    def doubt(self, tokens: Floats, other: float) -> Floats:
        """Standard deviation of the logarithm of the ratio of two costs."""
        index = np.minimum(self.sizes.searchsorted(tokens), len(self.sizes) - 1)
        against = min(int(self.sizes.searchsorted(other)), len(self.sizes) - 1)
        return self._filter.doubt(index, against)

    def observe(
        self, tokens: ForwardTokens, forwards: Floats, seconds: float, doubt: float = 0.0
    ) -> None:
        """Learns from the time of a burst.

        Args:
          tokens: ``[4, S]``, of the forwards of each stretch of the burst.
          forwards: ``[S]``, how many they were.
          seconds: of the whole burst.
          doubt: standard deviation of the logarithm of what these say that it was to take.
        """
        last = len(self.sizes) - 1
        few, many, share = _two_sizes(tokens)
        each = np.concatenate([few, many])
        counted = np.concatenate([(1 - share) * forwards, share * forwards])
        whole = np.maximum(np.ceil(each / self._largest) - 1, 0)
        index = self.sizes.searchsorted(each - whole * self._largest)
        counts = np.bincount(index, counted, minlength=last + 1)
        counts[last] += whole @ counted
        self._filter.update(self.measured * counts, seconds, doubt)
        self._update()

    def _update(self) -> None:
        corrected = self.measured * np.exp(self._filter.errors)
        self._seconds: Floats = np.maximum.accumulate(corrected)


class _Correction:
    """An extended Kalman filter. The state is the logarithm of what each of J sizes costs over what
    was measured, then the same of all sizes in common, then of a burst's overhead; what is
    observed is the logarithm of a burst's seconds.

    Args:
      places: ``[J]``, logarithms of the sizes.
      overhead: seconds, as measured.
    """

    def __init__(self, places: Floats, overhead: float):
        self._overhead = overhead
        count = len(places)
        apart = (places[:, None] - places) / ALIKE
        errors = ERROR**2 * np.exp(-(apart**2)) + OWN_ERROR**2 * np.eye(count)
        self._covariance = np.zeros((count + 2, count + 2))
        self._covariance[:count, :count] = errors
        self._covariance[count, count] = LEVEL**2
        self._covariance[-1, -1] = OVERHEAD_ERROR**2
        self._prior = self._covariance.copy()
        self._drift = np.zeros_like(self._covariance)
        self._drift[:count, :count] = errors * (DRIFT / ERROR) ** 2
        self._drift[count, count] = LEVEL_DRIFT**2
        self._drift[-1, -1] = OVERHEAD_DRIFT**2
        self._state = np.zeros(count + 2)
        self._noise = NOISE**2
        self._far_out = 0

    @property
    def errors(self) -> Floats:
        """``[J]``, of the sizes."""
        return self._state[:-2]

    def doubt(self, index: np.ndarray, against: int) -> Floats:
        covariance = self._covariance
        variance = covariance[index, index] + covariance[against, against]
        found: Floats = np.sqrt(np.maximum(variance - 2 * covariance[index, against], 0))
        return found

    def update(self, seconds_by_size: Floats, seconds: float, doubt: float) -> None:
        """Takes in a burst that was to spend so long at each size, ``[J]``, and did in all."""
        times = np.empty_like(self._state)
        times[:-2] = seconds_by_size * np.exp(self._state[:-2] + self._state[-2])
        times[-2] = times[:-2].sum()
        times[-1] = self._overhead * np.exp(self._state[-1])
        whole = times[-2] + times[-1]
        slope = times / whole
        surprise = float(np.log(seconds / whole))
        self._covariance += self._drift
        toward = self._covariance @ slope
        known = float(slope @ toward)
        known += doubt**2
        deviation = (known + self._noise) ** 0.5
        self._far_out = self._far_out + 1 if abs(surprise) > FAR_OUT * deviation else 0
        if 0 < self._far_out < FAR_OUT_RUN:
            return
        if self._far_out:
            self._covariance[-2, -2] = LEVEL**2  # the machine is another than it was
            toward = self._covariance @ slope
            known = float(slope @ toward) + doubt**2
            deviation = (known + self._noise) ** 0.5
        surprise = min(max(surprise, -OUTLIER * deviation), OUTLIER * deviation)
        # What is not explained by what was not known is noise.
        found = max(surprise**2 - known, 0.0)
        self._noise += 0.03 * (found - self._noise)
        self._noise = min(max(self._noise, LEAST_NOISE**2), MOST_NOISE**2)
        gain = toward / (known + self._noise)
        self._state += gain * surprise
        self._covariance -= np.outer(gain, toward)
        np.clip(self._state[:-2], -1, 1, out=self._state[:-2])
        diagonal, most = np.einsum("ii->i", self._covariance), np.einsum("ii->i", self._prior)
        if (diagonal > most).any():
            scale = np.sqrt(np.minimum(most / diagonal, 1))
            self._covariance *= scale[:, None] * scale


def _two_sizes(tokens: ForwardTokens) -> tuple[Floats, Floats, Floats]:
    """Two numbers of tokens and the share of the second that stand for all that vary so: a window
    has no drafts, or mostly as many as there may be."""
    mean, variance, least, most = tokens
    spread = np.sqrt(variance)
    few, many = np.maximum(mean - spread, least), np.minimum(mean + spread, most)
    apart = np.maximum(many - few, 1e-6)
    return few, many, np.clip((mean - few) / apart, 0, 1)


def _monotone(seconds: Floats) -> Floats:
    """The closest costs that never fall from one size to the next, in logarithms: neighbours that
    do are pooled."""
    pools: list[tuple[float, int]] = []
    for value in np.log(seconds):
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            (one, n), (two, m) = pools[-2:]
            pools[-2:] = [((n * one + m * two) / (n + m), n + m)]
    return np.exp(np.repeat([value for value, _ in pools], [count for _, count in pools]))


def _smooth(places: Floats, values: Floats, error: float) -> Floats:
    """Values drawn to a line through their neighbours, the more the less certain they are.

    Args:
      places: ``[J]``, logarithms of sizes.
      values: ``[J]``, logarithms of what was measured, with a standard ``error``.
    """
    apart = places[:, None] - places
    weights = np.exp(-((apart / NEIGHBOURS) ** 2))
    total = weights.sum(axis=1)
    middle = weights @ places / total
    mean = weights @ values / total
    square = weights @ places**2 / total - middle**2
    slope = (weights @ (places * values) / total - middle * mean) / (square + 1e-9)
    line = mean + slope * (places - middle)
    trust = OWN_ERROR**2 / (OWN_ERROR**2 + error**2)
    smooth: Floats = trust * values + (1 - trust) * line
    return smooth


def measure(
    time_forward: Callable[[int], float],
    sizes: Sequence[int],
    *,
    reach: float = np.inf,
    overhead: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measures a table: every size a few times, in rounds, so that other work of the machine
    meets all of them alike; the median counts.

    Args:
      time_forward: runs a forward of T tokens and returns its seconds; compiles nothing.
      sizes: the static sizes T, ascending.
      reach: tokens that a forward can be timed with, at most. Sizes that are not reached cost what
        those before them let expect.
      overhead: says afterwards what a burst takes beside its forwards; None where that was not
        measured.
    """
    started = clock()
    rounds: list[list[float]] = []
    timed = sizes[: int(np.searchsorted(sizes, reach)) + 1]
    while len(rounds) < ROUNDS and (not rounds or clock() - started < MEASURE_SECONDS):
        rounds.append([max(time_forward(size), 1e-9) for size in timed])
    logs = np.log(rounds)
    medians = np.median(logs, axis=0)
    # The median's standard error, of all sizes alike: five values say little of one.
    deviation = 1.48 * np.median(np.abs(logs - medians))
    error = 1.25 * deviation / len(rounds) ** 0.5
    seconds = np.exp(_smooth(np.log(timed), medians, error))
    seconds = np.append(seconds, _beyond(np.array(timed), seconds, np.array(sizes[len(timed) :])))
    measured = OVERHEAD if overhead is None else max(overhead(), 1e-5)
    return CostTable(sizes, seconds.tolist(), measured)


def _beyond(sizes: np.ndarray, seconds: Floats, larger: np.ndarray) -> Floats:
    """Seconds of ``larger`` sizes, on the line through those within a factor of 4 of the last."""
    last = sizes >= sizes[-1] / 4
    if last.sum() < 2:
        return seconds[-1] * larger / sizes[-1]
    slope = np.polyfit(sizes[last], seconds[last], 1)[0]
    found: Floats = seconds[-1] + max(slope, 0) * (larger - sizes[-1])
    return found


def kept_table(
    folder: Path | None, key: Mapping[str, Any], measured: Callable[[], CostTable]
) -> CostTable:
    """Returns the table that is kept in a folder, or a measured one, which is then kept.

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
            return CostTable(kept["sizes"], kept["seconds"], kept["overhead"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not whole: it is measured again
    table = measured()
    whole = {
        "key": json.loads(text),
        "sizes": table.sizes.tolist(),
        "seconds": table.measured.tolist(),
        "overhead": table.overhead,
    }
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    # A folder that cannot be written to keeps nothing.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    return table
