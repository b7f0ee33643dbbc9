"""The window of each sequence in the next burst: fixed, or chosen by speed.

A burst with windows W_i decodes

    Σ E_i(W_i) / cost(Σ T_i(W_i))

tokens per second, where a forward of sequence i commits E_i tokens and computes T_i, and the cost
comes from a table (`wedlm_jax.engine.windows.costs`). Before every burst the windows with the
highest rate are chosen. Without windows everything is known: E = T = 1.

The number of right drafts in a row is assumed to be geometric: each further one is right with
probability q, so

    E(W) = 1 + q + q² + … + q^(W - 1).

A single number thus determines what any window commits. Each sequence has its own, from what its
recent forwards have committed; while these are few, the mean of all sequences of its kind counts
more.

While windows do not pay nothing is learnt about them, so they are tried from time to time: a few
sequences get a window for one burst, as long as trials cost only a small share of the time. While
windows pay, an occasional burst without them checks the gain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from wedlm_jax.engine.interface import Burst, Report, Request
from wedlm_jax.engine.scheduling.sequence import SequenceState
from wedlm_jax.engine.windows.costs import CostTable, Floats


class WindowChoice(Protocol):
    """Chooses windows from burst to burst.

    The next burst may be chosen before the report of the last one arrives, so a report is
    interpreted by its burst, never by the last choice.

    Attributes:
      costs: the costs of forwards, corrected by every burst; None until they are known.
      most_forwards: limit of the next burst if its windows are a trial or a check; else None.
    """

    costs: CostTable | None
    most_forwards: int | None

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get, for which room is reserved."""

    def lookup(self, request: Request) -> int:
        """Returns the most drafts that are copied from a request's text."""

    def is_free(self, request: Request) -> bool:
        """Returns whether a request's window is chosen for each burst, and may be 0."""

    def choose(self, running: Sequence[SequenceState]) -> list[int]:
        """Returns the window of each sequence in the next burst, no wider than `widest`."""

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        """Learns from the report of a burst, before the sequences take it in.

        Args:
          running: the sequences for which it was planned; some may have left meanwhile.
          seconds: how long it took; None if that is not known.
        """


class FixedWindows:
    """Gives each request the window that it asks for, or the engine's.

    Args:
      window: W of requests that do not set it.
      lookup: the most drafts that are copied from a text. A request with a window of masks gets
        copies only if it asks for them: the number of its forwards then does not depend on measured
        costs, and a program without room for copies is a little faster.
    """

    def __init__(self, window: int, lookup: int = 0):
        self._window, self._lookup = window, lookup
        self.costs: CostTable | None = None
        self.most_forwards: int | None = None

    def widest(self, request: Request) -> int:
        params = request.params
        if params.mode == "ar" or (
            params.mode == "verified" and params.draft in ("lookup", "none")
        ):
            return 0
        return self._window if request.window is None else request.window

    def lookup(self, request: Request) -> int:
        params = request.params
        copies = params.draft == "lookup" or (params.draft == "auto" and not self.widest(request))
        # A window of 0 makes a request autoregressive.
        return self._lookup if params.mode == "verified" and copies and request.window != 0 else 0

    def is_free(self, request: Request) -> bool:
        return False

    def choose(self, running: Sequence[SequenceState]) -> list[int]:
        return [self.widest(sequence.request) for sequence in running]

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        if self.costs is not None and seconds is not None and report.sizes:
            self.costs.learn(report.sizes, report.by_size, seconds, windowless=report.windowless)


# --- Windows chosen by speed -----------------------------------------------------------------

GAIN = 1.03
"""The factor by which windows must promise to be faster, since the promise is uncertain."""
DOUBT = 1.3
"""The factor by which they may be faster than promised, because the table may be wrong."""
TRIALS, TRIED = 0.008, 0.04
"""The share of the time that trials of windows may lose by the table, and the share that they may
take. The second is a limit in case the table is wrong about the loss."""
FADING = 0.999
"""The share of the account of trials that is kept from burst to burst."""
ENOUGH = 12.0
"""The number of forwards with windows, including the prior's, before which a kind is unknown."""
HOPE = 0.9
"""The value of q before any forward."""
PRIOR, OWN_MEMORY = 4.0, 48.0
"""The weight, in forwards, of a kind's mean for one of its sequences; and the number of forwards
after which a sequence's older ones have faded."""
MEMORY, MOST_AT_ONCE = 128.0, 8.0
"""The number of forwards that a kind remembers, and the most that count per sequence and burst."""
DRAFTS_MEMORY = 500.0
"""The number of accepted drafts that are remembered, for the ratio of drafts to accepted ones."""
STALE = 0.98
"""The share of a kind's memory that is kept over a burst without windows."""
CERTAIN = 3.0
"""The promised speed-up from which windows need no check."""
CHECKS, FIRST_CHECK = 0.01, 0.05
"""The share of the time that bursts without windows may lose where windows pay: in the long run,
and for the first of them."""
HARMLESS = 1.05
"""The factor by which windows may slow a forward down if all sequences try them at once."""
SHORT = 8
"""The forwards of a burst that is a trial of windows, or a check without them. A longer one, in
which a short answer is decoded to its end, would cost more and not tell more."""
WAIT = 16
"""The number of bursts after which windows are considered again at the latest."""
PRICES = np.geomspace(0.01, 0.7, 12)
"""Prices of a computed token in committed tokens, for each of which the best windows are found."""


class _Kind:
    """What sequences of one kind, such as greedy ones in mode "verified", commit with the widest
    window: ``tokens`` in ``forwards``. These begin with an optimistic prior, which soon fades."""

    def __init__(self, hope: float):
        self.tokens, self.forwards = PRIOR * hope, PRIOR

    @property
    def mean(self) -> float:
        return self.tokens / self.forwards

    def keep(self, share: float) -> None:
        self.tokens, self.forwards = self.tokens * share, self.forwards * share


@dataclasses.dataclass(slots=True)
class _Evidence:
    """The same for one sequence, and its window in the last observed burst."""

    kind: _Kind
    tokens: float = 0.0
    forwards: float = 0.0
    window: int = 0

    @property
    def mean(self) -> float:
        return (self.tokens + PRIOR * self.kind.mean) / (self.forwards + PRIOR)


class AutoWindows(FixedWindows):
    """Chooses the windows of requests that do not set it.

    Args:
      widest: the widest window that may be chosen, at least 2.
      num_sequences: N, sequences per replica.
      costs: seconds of forwards; may be set later, before the first burst.
      replicas: R.
      lookup: as for `FixedWindows`.
      paper: W of requests in mode "paper", whose tokens depend on it; None to choose it, too.
    """

    def __init__(
        self,
        widest: int,
        num_sequences: int,
        costs: CostTable | None = None,
        *,
        replicas: int = 1,
        lookup: int = 0,
        paper: int | None = None,
    ):
        super().__init__(widest, lookup)
        self.costs, self._paper = costs, paper
        self._num_sequences, self._replicas = num_sequences, replicas
        self._widths = np.array(sorted({0, *(max(widest // k, 2) for k in (8, 4, 2, 1))}))
        q = np.linspace(0.0, 0.999, 200)[:, None] ** np.arange(widest)
        self._curves = np.cumsum(q, axis=1).T[np.maximum(self._widths, 1) - 1]
        """``[K, 200]``, E of each width by q."""
        self._hope = float((HOPE ** np.arange(widest)).sum())
        self._kinds: dict[tuple[str, bool], _Kind] = {}
        self._drafts = self._accepted = 20.0
        self._lost = self._tried = self._total = 0.0
        self._burst = 16.0
        self._unchecked, self._check = 0.0, FIRST_CHECK
        self._wait: dict[tuple[int, int], float] = {}
        """By the numbers of sequences with free and with fixed windows: how large the account has
        to be before the choice can be other than no windows. This saves time, since a choice takes
        as long as a small forward."""

    def widest(self, request: Request) -> int:
        usual = super().widest(request)
        fixed = self._paper is not None and request.params.mode == "paper"
        return min(usual, self._paper or 0) if fixed and request.window is None else usual

    def choose(self, running: Sequence[SequenceState]) -> list[int]:
        """Returns the window of each sequence in the next burst."""
        self.most_forwards = None
        if self._replicas == 1:
            return self._choose_together(running)
        chosen = [0] * len(running)
        for replica in range(self._replicas):
            inside = [
                i for i, one in enumerate(running) if one.index // self._num_sequences == replica
            ]
            windows = self._choose_together([running[i] for i in inside])
            for i, window in zip(inside, windows, strict=True):
                chosen[i] = window
        return chosen

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        """Learns from what a burst has committed, and how long it took."""
        super().observe(running, burst, report, seconds)
        here = [one for one in running if one.index >= 0 and burst.capacity[one.index] > 0]
        if not here or not report.num_run:
            return
        if report.num_run > SHORT:
            self._burst += (report.num_run - self._burst) / 8
        self._account(here, burst, report)
        windows = burst.windows
        if report.windowless:
            if self._unchecked:
                self._unchecked, self._check = 0.0, max(0.8 * self._check, CHECKS)
            for kind in self._kinds.values():
                kind.keep(STALE if kind.forwards > ENOUGH / STALE else 1.0)
        else:
            self._wait.clear()
            self._learn(here, burst, report)
        for one in here:
            if one.evidence is not None:
                one.evidence.window = int(windows[one.index])

    # --- choosing ---------------------------------------------------------------------------

    def is_free(self, request: Request) -> bool:
        if request.window is not None or not self.widest(request):
            return False
        return self._paper is None or request.params.mode != "paper"

    def _evidence(self, sequence: SequenceState) -> _Evidence:
        if sequence.evidence is None:
            params = sequence.request.params
            key = (params.mode, params.temperature > 0)
            kind = self._kinds.setdefault(key, _Kind(self._hope))
            sequence.evidence = _Evidence(kind)
        return sequence.evidence  # type: ignore[no-any-return]

    def _expected(self, sequences: Sequence[SequenceState]) -> Floats:
        """Returns the expected tokens per forward of each sequence with each width, ``[n, K]``."""
        means = [self._evidence(one).mean for one in sequences]
        return np.array([np.interp(means, self._curves[-1], curve) for curve in self._curves]).T

    def _choose_together(self, running: Sequence[SequenceState]) -> list[int]:
        """Chooses the windows of the sequences of one replica."""
        chosen = [0 if self.is_free(one.request) else -1 for one in running]
        free = [one for one, window in zip(running, chosen, strict=True) if not window]
        fixed = [
            self.widest(one.request) for one, window in zip(running, chosen, strict=True) if window
        ]
        widths = iter(self._of_free(free, fixed) if free else ())
        others = iter(fixed)
        return [next(others if window else widths) for window in chosen]

    def _of_free(self, free: list[SequenceState], fixed: list[int]) -> list[int]:
        """Chooses the windows of ``free`` sequences, given the ``fixed`` windows of others."""
        costs, widths, n = self.costs, self._widths, len(free)
        key = (n, len(fixed))
        if not any(fixed) and self._total < self._wait.get(key, 0.0):
            return [0] * n
        assert costs is not None, "the costs of forwards must be known first"
        committed = self._expected(free)
        more = np.where(widths, (committed - 1) * (self._drafts / self._accepted), 0)
        computed = widths + 1 + more
        left = np.array([one.request.params.max_tokens - one.num_output for one in free])
        np.minimum(committed, left[:, None], out=committed)
        # Candidates: the same width for all, 0 first; for each price the best width of each
        # sequence; and a trial by a few sequences.
        alike = np.repeat(np.arange(len(widths))[:, None], n, axis=1)
        priced = (committed - PRICES[:, None, None] * computed).argmax(axis=2)
        few = np.zeros((1, n), np.int64)
        unknown = np.argsort([one.evidence.forwards for one in free], kind="stable")
        few[0, unknown[: round(n**0.5 / 2 + 0.5)]] = max(len(widths) - 3, 1)
        picks = np.concatenate([alike, priced, few])
        every = np.arange(n)
        others = sum(1.25 * window + 1 if window else 1 for window in fixed)
        tokens = computed[every, picks].sum(axis=1) + others
        # A window mostly has either no drafts or nearly as many as it can have.
        seconds = costs.expected(tokens, 0.85 * more[every, picks].sum(axis=1) / n**0.5)
        if not any(fixed):
            seconds[0] = costs.seconds(float(n + len(fixed)), windowless=True)
        rates = (committed[every, picks].sum(axis=1) + len(fixed)) / seconds
        rates[1:][~picks[1:].any(axis=1)] = 0
        known = all(one.evidence.kind.forwards >= ENOUGH for one in free)
        best = 1 + int(rates[1:-1].argmax())
        gain, short = rates[best] / rates[0], min(self._burst, SHORT)
        took = short * seconds[best] / costs.level
        if not known:
            best = best if seconds[best] < HARMLESS * seconds[0] else len(rates) - 1
        elif gain > GAIN:
            due = self._unchecked * self._check >= (gain - 1) * took
            if due and gain < CERTAIN:
                best, self.most_forwards = 0, SHORT
        else:
            # A trial by all is worthwhile if windows might pay when the table is wrong; the loss is
            # then estimated as if the table were wrong in the other direction.
            worst = gain / DOUBT
            if gain * DOUBT < 1:
                best = len(rates) - 1
                worst = rates[best] / rates[0]
            loss = max(1 - worst, 0) * short * seconds[best] / costs.level
            if self._lost + loss > TRIALS * self._total or self._tried + took > TRIED * self._total:
                best, self._wait[key] = 0, self._total + min(loss / TRIALS, WAIT * took)
            else:
                self._tried += took
                self.most_forwards = SHORT
        return widths[picks[best]].tolist()  # type: ignore[no-any-return]

    # --- learning ---------------------------------------------------------------------------

    def _account(self, here: list[SequenceState], burst: Burst, report: Report) -> None:
        """Adds a burst to the account of the time taken, and of the time lost by windows. Both are
        computed from the table, at one level, since the time of a single burst is noisy."""
        costs = self.costs
        if costs is None or not report.sizes:
            return
        took = costs.of_sizes(report.sizes, windowless=report.windowless) @ report.by_size
        took = float(took) / costs.level
        self._lost, self._tried = self._lost * FADING, self._tried * FADING
        self._total = self._total * FADING + took
        if report.windowless:
            return
        self._unchecked += took
        done = [
            (
                report.num_output[one.index] - one.num_output,
                report.num_forwards[one.index] - one.num_forwards,
                report.num_computed[one.index] - one.num_computed,
            )
            for one in here
        ]
        tokens, forwards, computed = np.sum(done, axis=0) / self._replicas
        free = all(one.evidence is not None for one in here)
        # The first trial of a kind has no limit, and does not count as a loss.
        if forwards > 0 and free and all(one.evidence.kind.forwards >= ENOUGH for one in here):
            active = forwards / report.num_run
            plain = tokens / active * costs.seconds(active, windowless=True)
            largest = costs.sizes[-1]
            plain += max(computed - tokens, 0) * costs.seconds(float(largest)) / largest
            self._lost = max(self._lost + took - float(plain) / costs.level, 0.0)

    def _learn(self, here: list[SequenceState], burst: Burst, report: Report) -> None:
        """Learns how many tokens windows have committed."""
        some = [one for one in here if burst.windows[one.index] and self.is_free(one.request)]
        if not some:
            return
        at = np.array([one.index for one in some])
        windows = burst.windows[at]
        columns = self._widths.searchsorted(windows)
        tokens = report.num_output[at] - [one.num_output for one in some]
        forwards = report.num_forwards[at] - [one.num_forwards for one in some]
        slots = report.num_token_instances[at] - [one.num_token_instances for one in some]
        drafts = slots - forwards * (windows + 1)
        self._drafts += max(float(drafts.sum()), 0.0)
        self._accepted += float((tokens - forwards).sum())
        keep = min(DRAFTS_MEMORY / self._accepted, 1.0)
        self._drafts, self._accepted = self._drafts * keep, self._accepted * keep
        # Windows that opened in the middle of a text had no drafts yet.
        opened = [not self._evidence(one).window and one.num_forwards > 0 for one in some]
        choices = [one.request.params.mode == "verified" for one in some]
        forwards = forwards - opened
        more = np.maximum(tokens - np.multiply(opened, choices) - forwards, 0)
        # Converts what these windows have committed to the widest window.
        narrow = self._expected(some)[np.arange(len(some)), columns] - 1
        narrow = (more + PRIOR * narrow) / (np.maximum(forwards, 0) + PRIOR)
        wide = np.empty(len(some))
        for column in set(columns.tolist()):
            inside = columns == column
            wide[inside] = np.interp(narrow[inside] + 1, self._curves[column], self._curves[-1])
        more = more * (wide - 1) / np.maximum(narrow, 1e-3)
        keeps = np.exp(-np.maximum(forwards, 0) / OWN_MEMORY)
        found = zip(some, more.tolist(), forwards.tolist(), keeps.tolist(), strict=True)
        for one, m, f, kept in found:
            if f > 0:
                evidence, share = one.evidence, min(1.0, MOST_AT_ONCE / f)
                evidence.tokens = evidence.tokens * kept + m + f
                evidence.forwards = evidence.forwards * kept + f
                evidence.kind.tokens += (m + f) * share
                evidence.kind.forwards += f * share
        for kind in self._kinds.values():
            kind.keep(MEMORY / max(kind.forwards, MEMORY))
