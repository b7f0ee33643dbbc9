"""The window of each sequence in the next burst: fixed, or chosen by speed.

A burst with windows W_i decodes

    Σ E_i(W_i) / cost(Σ T_i(W_i))

tokens per second, where a forward of sequence i commits E_i tokens and computes T_i, and the cost
comes from a table (`wedlm_jax.engine.costs`). Before every burst the windows with the
highest rate are chosen. Without windows E = T = 1, unless drafts are copied from the text: then E
and T are estimated from recent forwards, too.

The number of right drafts in a row is assumed to be geometric: each additional one is right with
probability q, so

    E(W) = 1 + q + q² + … + q^(W - 1).

So a single number determines what any window commits. Each sequence has its own, estimated from
what its recent forwards have committed; while these are few, the mean of the last sequences of its
kind counts more. The mean is taken over sequences, not forwards: if windows do not pay, a sequence
soon stops using them, so a mean over forwards would remember the easy texts of long ago.

While windows do not pay, they are not used and nothing is learnt about them, so they are tried from
time to time: a few sequences, or all if that costs little, get windows for two short bursts, as
long as trials cost only a small share of the time. While windows pay, an occasional burst without
them checks the gain. And a burst is short while most of its windows belong to sequences that have
not used any yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from wedlm_jax.completion import Drafts
from wedlm_jax.engine.costs import CostTable, Floats
from wedlm_jax.engine.interface import Burst, Report, Request
from wedlm_jax.engine.sequence import SequenceState


class WindowChoice:
    """Gives each request the window that it asks for, or the engine's.

    The next burst's windows may be chosen before the last burst's report arrives, so a report is
    interpreted by the windows of its own burst, never by the latest choice.

    Args:
      window: W for requests that do not set it.
      lookup: maximum number of drafts copied from a text. A request with a window of masks gets
        copies only if it asks for them: the number of its forwards then does not depend on measured
        costs, and a program without room for copies is a little faster.
      drafter: whether the masks are a drafter's. Requests then get copies, too, unless they ask for
        masks alone: without the drafter they would have them.

    Attributes:
      costs: the costs of forwards, corrected by every burst; None until they are known.
      most_forwards: limit on the next burst's forwards if its windows are a trial, a check, or the
        first for most sequences; else None.
    """

    def __init__(self, window: int, lookup: int = 0, *, drafter: bool = False):
        self._window, self._lookup, self._drafter = window, lookup, drafter
        self.costs: CostTable | None = None
        self.most_forwards: int | None = None

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get, for which room is reserved."""
        params = request.params
        if params.mode == "ar" or (
            params.mode == "verified" and params.draft in ("lookup", "none")
        ):
            return 0
        return self._window if request.window is None else request.window

    def lookup(self, request: Request) -> int:
        """Returns the maximum number of drafts copied from a request's text."""
        params = request.params
        copies = params.draft in ("lookup", "both")
        copies |= params.draft == "auto" and (self._drafter or not self.widest(request))
        # A window of 0 makes a request autoregressive.
        return self._lookup if params.mode == "verified" and copies and request.window != 0 else 0

    def is_free(self, request: Request) -> bool:
        """Returns whether a request's window is chosen for each burst, and may be 0."""
        return False

    def choose(self, running: Sequence[SequenceState]) -> list[int]:
        """Returns the window of each sequence in the next burst, no wider than `widest`."""
        return [self.widest(sequence.request) for sequence in running]

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        """Learns from the report of a burst, before the sequences take it in.

        Args:
          running: the sequences for which it was planned; some may have left since.
          seconds: duration of the burst; None if unknown.
        """
        if self.costs is not None and seconds is not None and report.sizes:
            self.costs.learn(report.sizes, report.by_size, seconds, windowless=report.windowless)


# --- Windows chosen by speed -----------------------------------------------------------------

GAIN = 1.03
"""The speed-up that windows must promise to be used, since the promise is uncertain."""
DOUBTS, MANY = 0.7, 64
"""With MANY sequences windows must promise it even if a forward costs DOUBTS standard deviations
more than expected, since few bursts are left in which to notice a mistake. With fewer sequences, a
smaller part of that: the next bursts tell."""
TRIAL = (1, 8)
"""The forwards of the two bursts that try what seems slower: windows, or none. The first switches
programs, which takes longer than a forward of a small model, so its time says nothing. A longer
second one, in which a short answer is decoded to its end, would cost more without telling more; so
a burst with the first windows of new sequences is no longer than that."""
TRIAL_OVERHEADS = 5
"""What a trial costs in addition to its forwards, in multiples of a burst's overhead: one for each
of its two bursts, one and a half for each of two switches of program, as measured on a CPU."""
SHARES, GROWTH = (0.01, 0.02), 4.0
"""SHARES limits the share of time spent on trials: of windows, and of no windows while windows seem
to pay. The first trial is early; GROWTH is the factor by which the time between trials grows until
that share is reached."""
HARMLESS = 1.05
"""All sequences try windows at once only if that slows a forward down by less than this factor."""
OPENING = 5
"""The first forward of a window has no drafts yet, so it commits a single token. A sequence without
a window is assumed to use the one that it gets for OPENING forwards."""
HOPE = 0.9
"""The value of q before any forward."""
PRIOR, OWN_MEMORY = 4.0, 48.0
"""PRIOR is the weight, in forwards, of a kind's mean in the estimate for one of its sequences, and
the maximum weight of a sequence in that mean. OWN_MEMORY is the number of forwards after which a
sequence's older ones have mostly faded."""
MEMORY = 16.0
"""The same for a kind: the last four sequences, or a quarter of those running, predict the next."""
ENOUGH = 8.0
"""The weight, including the prior's, below which a kind is unknown."""
DRAFTS_MEMORY = 500.0
"""How many accepted drafts are remembered, for the ratio of drafts to accepted ones."""
LEARN_EVERY = 4
"""After this many bursts in a row without windows, costs are learnt from only one in this many:
learning takes a fifth of a millisecond, which is 1 % of a burst of a small model."""
PATIENCE = 16
"""The maximum number of bursts before windows are considered again."""
PRICES = np.geomspace(0.01, 0.7, 12)
"""Prices of a computed token, in committed tokens; the best windows are found for each price."""


@dataclasses.dataclass(slots=True)
class _Mean:
    """A mean per forward, to which older forwards contribute less: ``total`` over ``forwards``."""

    total: float = 0.0
    forwards: float = 0.0

    def add(self, total: float, forwards: float, memory: float) -> None:
        kept = math.exp(-forwards / memory)
        self.total = self.total * kept + total
        self.forwards = self.forwards * kept + forwards

    @property
    def value(self) -> float:
        return self.total / self.forwards


def _weight(forwards: float) -> float:
    """Returns the weight of a sequence, in forwards, in the mean of its kind."""
    return PRIOR * forwards / (PRIOR + forwards)


@dataclasses.dataclass(slots=True)
class _Evidence:
    """The tokens per forward of a sequence, either with windows (as many as the widest would have
    committed) or without.

    Attributes:
      kind: the mean of the last sequences of its kind, such as greedy ones in mode "verified". It
        begins with a prior, which soon fades.
      own: the mean of its own forwards.
    """

    kind: _Mean
    own: _Mean = dataclasses.field(default_factory=_Mean)

    @property
    def mean(self) -> float:
        """The expected tokens per forward."""
        return (self.own.total + PRIOR * self.kind.value) / (self.own.forwards + PRIOR)

    def add(self, tokens: float, forwards: float, memory: float) -> None:
        """Adds what forwards have committed; ``memory`` is that of the kind."""
        before = _weight(self.own.forwards)
        self.own.add(tokens, forwards, OWN_MEMORY)
        weight = max(_weight(self.own.forwards) - before, 0.0)
        self.kind.add(weight * tokens / max(forwards, 1), weight, memory)


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known about a sequence: its forwards with windows and without, and its window in the
    last observed burst."""

    windows: _Evidence
    plain: _Evidence
    window: int = 0


@dataclasses.dataclass(slots=True)
class _Drafts:
    """Counts of drafts and of accepted ones, for their ratio; older ones count less."""

    made: float = 20.0
    accepted: float = 20.0

    def add(self, made: float, accepted: float) -> None:
        self.made += max(made, 0.0)
        self.accepted += accepted
        kept = min(DRAFTS_MEMORY / self.accepted, 1.0)
        self.made, self.accepted = self.made * kept, self.accepted * kept

    @property
    def per_accepted(self) -> float:
        return self.made / self.accepted


def _drafts_of(sequence: SequenceState, report: Report) -> Drafts:
    """Returns the drafts that a sequence checked in a burst if it may have copies; else none."""
    new = report.tokens[sequence.index] if sequence.lookup else None
    return Drafts() if new is None else Drafts.read(new.drafts_at)


class AutoWindows(WindowChoice):
    """Chooses the windows of requests that do not set one.

    Args:
      widest: the widest window that may be chosen, at least 2.
      num_sequences: N, sequences per replica.
      costs: seconds of forwards; may be set later, before the first burst.
      replicas: R.
      lookup, drafter: as for `WindowChoice`.
      paper: W for requests in mode "paper", whose tokens depend on it; None to choose it, too.
    """

    def __init__(
        self,
        widest: int,
        num_sequences: int,
        costs: CostTable | None = None,
        *,
        replicas: int = 1,
        lookup: int = 0,
        drafter: bool = False,
        paper: int | None = None,
    ):
        super().__init__(widest, lookup, drafter=drafter)
        self.costs, self._paper = costs, paper
        self._num_sequences, self._replicas = num_sequences, replicas
        self._widths = np.array(sorted({0, *(max(widest // k, 2) for k in (8, 4, 2, 1))}))
        q = np.linspace(0.0, 0.999, 200)[:, None] ** np.arange(widest)
        self._curves = np.cumsum(q, axis=1).T[np.maximum(self._widths, 1) - 1]
        """``[K, 200]``, E of each width by q."""
        self._hope = float((HOPE ** np.arange(widest)).sum())
        self._kinds: dict[tuple[str, bool], tuple[_Mean, _Mean]] = {}
        self._masks, self._copies = _Drafts(), _Drafts()
        """The drafts of forwards with windows, and of those without."""
        self._copying = _Mean(1.0, 1.0)
        """How many times longer a forward without windows takes because of copies."""
        self._windowless = 0
        """How many bursts in a row had no windows."""
        self._used = False
        """Whether windows were used in the last burst."""
        self._since, self._burst = 0.0, 0.0
        """The time, by the table of costs, since `_used` changed; and that of the last burst."""
        self._looks = [0, 0]
        """How often windows were tried while they did not seem to pay, and how often none while
        they did."""
        self._trial: bool | None = None
        """Whether windows seemed to pay when the last choice began a trial, which takes another
        burst; None if it began none."""
        self._next: dict[int, float] = {}
        """The time without windows after which to consider them again, by number of sequences: a
        choice takes as long as a small forward."""

    def widest(self, request: Request) -> int:
        usual = super().widest(request)
        fixed = self._paper is not None and request.params.mode == "paper"
        return min(usual, self._paper or 0) if fixed and request.window is None else usual

    def is_free(self, request: Request) -> bool:
        if request.window is not None or not self.widest(request):
            return False
        return self._paper is None or request.params.mode != "paper"

    def choose(self, running: Sequence[SequenceState]) -> list[int]:
        self.most_forwards = None
        trial, self._trial = self._trial, None
        windows = [0 if self.is_free(one.request) else self.widest(one.request) for one in running]
        for replica in range(self._replicas):
            places = [
                i for i, one in enumerate(running) if one.index // self._num_sequences == replica
            ]
            free = [i for i in places if self.is_free(running[i].request)]
            if free:
                fixed = [windows[i] for i in places if i not in free]
                chosen = self._of_free([running[i] for i in free], fixed, trial)
                for i, window in zip(free, chosen, strict=True):
                    windows[i] = window
        if self._trial is not None:
            self._looks[self._trial] += 1
        return windows

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        self._windowless = 0 if burst.windows.any() else self._windowless + 1
        # The first in a row are always learnt from: they are the purpose of a check.
        if self._windowless <= LEARN_EVERY or self._windowless % LEARN_EVERY == 0:
            super().observe(running, burst, report, seconds)
        free = [
            one
            for one in running
            if one.index >= 0 and burst.capacity[one.index] > 0 and self.is_free(one.request)
        ]
        if not (free and report.num_run):
            return
        used = [one for one in free if burst.windows[one.index]]
        copied = [one for one in free if one.lookup and not burst.windows[one.index]]
        if bool(used) != self._used:
            self._used, self._since = bool(used), 0.0
            self._next.clear()
        if self.costs is not None and report.sizes:
            # Taken from the table, relative to its level, since the time of a single burst is
            # noisy.
            each = self.costs.of_sizes(report.sizes, windowless=report.windowless)
            self._burst = float(each @ report.by_size) / self.costs.level
            self._since += self._burst
            if copied and not burst.windows.any():
                self._learn_copying(len(free), each, report)
        for some, with_windows in ((used, True), (copied, False)):
            if some:
                self._learn(some, burst, report, with_windows=with_windows)
        for one in free:
            self._known(one).window = int(burst.windows[one.index])

    # --- choosing ---------------------------------------------------------------------------

    def _known(self, sequence: SequenceState) -> _Known:
        if sequence.evidence is None:
            params = sequence.request.params
            key = (params.mode, params.temperature > 0)
            priors = _Mean(PRIOR * self._hope, PRIOR), _Mean(PRIOR, PRIOR)
            windows, plain = self._kinds.setdefault(key, priors)
            sequence.evidence = _Known(_Evidence(windows), _Evidence(plain))
        return sequence.evidence  # type: ignore[no-any-return]

    def _expected(self, sequences: Sequence[SequenceState]) -> Floats:
        """Returns the expected tokens per forward of each sequence with each width, ``[n, K]``."""
        means = [self._known(one).windows.mean for one in sequences]
        return np.array([np.interp(means, self._curves[-1], curve) for curve in self._curves]).T

    def _of_free(
        self, free: list[SequenceState], fixed: list[int], trial_of: bool | None
    ) -> list[int]:
        """Chooses the windows of ``free`` sequences, given the ``fixed`` windows of others and, as
        in `_trial`, the trial in progress."""
        costs, widths, n = self.costs, self._widths, len(free)
        if not (any(fixed) or self._used) and self._since < self._next.get(n, 0.0):
            return [0] * n
        assert costs is not None, "the costs of forwards must be known first"
        known = [self._known(one) for one in free]
        committed = self._expected(free)
        opened = np.array([one.window > 0 for one in known])
        committed -= (committed - 1) * np.where(opened, 0, 1 / OPENING)[:, None]
        committed[:, 0] = [one.plain.mean for one in known]
        drafts = np.where(widths, self._masks.per_accepted, self._copies.per_accepted)
        more = (committed - 1) * drafts
        computed = widths + 1 + more
        left = np.array([one.request.params.max_tokens - one.num_output for one in free])
        np.minimum(committed, left[:, None], out=committed)
        # Candidates: no windows; the same width for all; for each price the best width of each
        # sequence; and a trial by the few sequences that are least known.
        alike = np.repeat(np.arange(len(widths))[:, None], n, axis=1)
        priced = (committed - PRICES[:, None, None] * computed).argmax(axis=2)
        few = np.zeros((1, n), np.int64)
        unknown = np.argsort([one.windows.own.forwards for one in known], kind="stable")
        few[0, unknown[: round(n**0.5 / 2 + 0.5)]] = max(len(widths) - 3, 1)
        picks = np.concatenate([alike, priced, few])
        every = np.arange(n)
        others = sum(1.25 * window + 1 if window else 1 for window in fixed)
        tokens = computed[every, picks].sum(axis=1) + others
        # A forward mostly has either no drafts or nearly as many as it can have.
        spread = 0.85 * more[every, picks].sum(axis=1) / n**0.5
        seconds = costs.expected(tokens, spread)
        if not any(fixed):
            # Copies are mostly in few forwards, which then have many.
            without = costs.seconds(float(n + len(fixed)), windowless=True)
            seconds[0] = without * self._copying.value
        rates = (committed[every, picks].sum(axis=1) + len(fixed)) / seconds
        rates[1:][~picks[1:].any(axis=1)] = 0
        best = 1 + int(rates[1:-1].argmax())
        trial = best if seconds[best] < HARMLESS * seconds[0] else len(rates) - 1
        if any(one.windows.kind.forwards < ENOUGH for one in known):
            best, self.most_forwards = trial, TRIAL[-1]
        else:
            doubt = costs.doubt(tokens[best], tokens[0], windowless=not any(fixed))
            needed = GAIN * math.exp(DOUBTS * min(n / MANY, 1.0) * doubt)
            pays = bool(rates[best] > needed * rates[0])
            best, other = (best, 0) if pays else (0, trial)
            took = (sum(TRIAL) * seconds[other] + TRIAL_OVERHEADS * costs.overhead) / costs.level
            due = took * min(GROWTH ** self._looks[pays], 1 / SHARES[pays])
            if trial_of is not None:
                best, self.most_forwards = (other if trial_of == pays else best), TRIAL[1]
            elif self._used == pays and self._since >= due:
                best, self.most_forwards, self._trial = other, TRIAL[0], pays
            elif not pays:
                self._next[n] = min(due, self._since + PATIENCE * self._burst)
        chosen = widths[picks[best]]
        first = [not one.windows.own.forwards for one in known]
        if self.most_forwards is None and 2 * np.count_nonzero(chosen[first]) >= n:
            self.most_forwards = TRIAL[1]
        return chosen.tolist()  # type: ignore[no-any-return]

    # --- learning ---------------------------------------------------------------------------

    def _learn(
        self, some: list[SequenceState], burst: Burst, report: Report, *, with_windows: bool
    ) -> None:
        """Learns how many tokens per forward these sequences commit with windows, or without."""
        at = np.array([one.index for one in some])
        windows = burst.windows[at]
        tokens = report.num_output[at] - [one.num_output for one in some]
        forwards = report.num_forwards[at] - [one.num_forwards for one in some]
        slots = report.num_token_instances[at] - [one.num_token_instances for one in some]
        drafts, committed, counted = self._copies, tokens, forwards
        if with_windows:
            # Copies are not the window's merit: they do not depend on its width.
            copies = [_drafts_of(one, report) for one in some]
            tokens = tokens - [one.lookup_accepted for one in copies]
            slots = slots - [one.lookup for one in copies]
            drafts = self._masks
            committed, counted = self._as_widest(some, windows, tokens, forwards)
        made = slots - forwards * (windows + 1)
        drafts.add(float(made.sum()), float((tokens - forwards).sum()))
        for i, one in enumerate(some):
            known = self._known(one)
            evidence = known.windows if with_windows else known.plain
            evidence.add(committed[i], counted[i], max(MEMORY, len(some)))

    def _learn_copying(self, running: int, each: Floats, report: Report) -> None:
        """Learns how much longer forwards take because of copies; ``each`` is the cost at each of
        the report's sizes. Larger forwards than copies can make are those of prompts."""
        assert self.costs is not None
        running = -(-running // self._replicas)
        sizes, most = np.array(report.sizes), running * (1 + self._lookup)
        decodes = sizes <= sizes[sizes >= most].min(initial=sizes.max())
        forwards = float(report.by_size[decodes].sum())
        without = float(self.costs.seconds(float(running), windowless=True))
        took = float(each[decodes] @ report.by_size[decodes])
        self._copying.add(max(took / without, forwards), forwards, OWN_MEMORY)

    def _as_widest(
        self, some: list[SequenceState], windows: np.ndarray, tokens: np.ndarray, forwards: Floats
    ) -> tuple[Floats, Floats]:
        """Returns the tokens that these forwards would have committed with the widest window, and
        the number of forwards that could have drafts."""
        columns = self._widths.searchsorted(windows)
        # The first forward of a window has no drafts yet.
        opened = [not self._known(one).window for one in some]
        choices = [one.request.params.mode == "verified" for one in some]
        forwards = np.maximum(forwards - opened, 0)
        more = np.maximum(tokens - np.multiply(opened, choices) - forwards, 0)
        narrow = self._expected(some)[np.arange(len(some)), columns] - 1
        narrow = (more + PRIOR * narrow) / (forwards + PRIOR)
        curves = zip(narrow + 1, self._curves[columns], strict=True)
        wide = np.array([np.interp(x, curve, self._curves[-1]) for x, curve in curves])
        return forwards + more * (wide - 1) / np.maximum(narrow, 1e-3), forwards
