"""Chooses windows by load: wide while the device waits for memory, narrow once it computes.

A burst with windows W_i decodes

    Σ E_i(W_i) / cost(Σ T_i(W_i))

tokens a second. E_i is the number of tokens that a forward of sequence i commits, predicted from
what it and others like it have committed (`wedlm_jax.engine.windows.acceptance`); T_i the number
that it computes; the cost of a forward comes from a table (`wedlm_jax.engine.windows.cost`). Before
every burst the windows with the highest rate are chosen. With W = 0 everything is known: E = T = 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wedlm_jax.engine.burst import Burst, Report, Request
from wedlm_jax.engine.scheduling.sequence import SequenceState
from wedlm_jax.engine.windows.acceptance import NUM_TYPES, OWN_MEMORY, Acceptance, Floats
from wedlm_jax.engine.windows.choice import most_copies, widest_window
from wedlm_jax.engine.windows.cost import CostTable

WIDTHS = (0, 2, 4, 8, 16, 32, 64, 128)
"""Windows that may be chosen."""
STAY = 1.02
"""How much better another window must look than the present one: both predictions are uncertain,
and a wider window is full only from its second forward on."""
PRICES = np.concatenate([[0.0], np.geomspace(0.004, 1.0, 19)])
"""Committed tokens that a computed token must bring at least."""
COSTS_SECONDS = 0.05
"""Seconds of decoding between two updates of costs, each of which takes as long as a forward of a
small model."""
COUNTS = ("num_output", "num_forwards", "num_token_instances", "num_computed")


class AutoWindows:
    """Chooses the windows of requests that name none.

    A `wedlm_jax.engine.windows.choice.WindowChoice`.

    Args:
      widest: the widest window that may be chosen, at least 2.
      num_sequences: N, of each replica.
      costs: seconds of a forward; may be set later, before the first burst.
      replicas: R.
      lookup: the most drafts that are copied from a text.
    """

    def __init__(
        self,
        widest: int,
        num_sequences: int,
        costs: CostTable | None = None,
        *,
        replicas: int = 1,
        lookup: int = 0,
    ):
        self._widest, self._num_sequences, self.costs = widest, num_sequences, costs
        self._lookup = lookup
        self._widths = np.array([*(w for w in WIDTHS if w < widest), widest])
        self._kinds: dict[tuple[str, bool], Acceptance] = {}
        self._sequences = _Sequences(replicas * num_sequences)
        self._indices = np.zeros(0, np.int64)
        self._since_costs = 0.0

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get."""
        return widest_window(request, self._widest)

    def lookup(self, request: Request) -> int:
        """Returns the most drafts that are copied from a request's text."""
        return most_copies(request, self._lookup)

    def choose(self, running: Sequence[SequenceState]) -> Sequence[int]:
        """Returns the window of each sequence in the next burst."""
        known = self._sequences
        for sequence in running:
            if known.whose[sequence.index] != (sequence, sequence.num_admissions):
                self._enter(sequence)
        indices = self._indices = np.array([sequence.index for sequence in running], np.int64)
        replicas = indices // self._num_sequences
        for replica in set(replicas.tolist()):
            inside = indices[replicas == replica]
            free = known.free[inside]
            if free.any():
                self._choose_together(inside[free], inside[~free])
        return known.window[indices].tolist()  # type: ignore[no-any-return]

    def observe(
        self, running: Sequence[SequenceState], burst: Burst, report: Report, seconds: float | None
    ) -> None:
        """Learns what a burst has committed, and how long it took."""
        indices = self._indices
        indices = indices[burst.capacity[indices] > 0]  # some are preempted before they run
        if not len(indices) or not report.num_run or self.costs is None or seconds is None:
            return
        known = self._sequences
        counts = np.stack([np.asarray(getattr(report, name))[indices] for name in COUNTS])
        done = np.maximum(counts - known.counts[:, indices], 0).astype(float)
        self._since_costs += seconds
        if self._since_costs >= COSTS_SECONDS:
            self._since_costs = 0.0
            self._learn_costs(indices, done, report.num_run, burst.chunk_tokens, seconds)
        # The first forward of a window commits drafts of the window before it.
        opening = known.opens[indices] & (done[1] > 0)
        known.opens[indices] &= ~opening
        known.counts[:, indices] = counts
        tokens, forwards, slots, _ = done
        tokens = np.maximum(tokens - opening * known.first_tokens[indices], 0)
        slots = slots - opening * (known.window[indices] + known.first_tokens[indices])
        forwards = forwards - opening
        windows = known.column[indices] > 0
        for number, acceptance in enumerate(self._kinds.values()):
            acceptance.fade()
            which = np.flatnonzero((known.kind[indices] == number) & windows & (forwards > 0))
            if len(which):
                own = known.own[indices[which]]
                columns = known.column[indices[which]]
                acceptance.learn(own, columns, tokens[which], forwards[which], slots[which])
                known.own[indices[which]] = own
        if not windows.all():  # without a window there is no new evidence, and the old one ages
            known.own[indices[~windows]] *= np.exp(-done[1][~windows] / OWN_MEMORY)[:, None]

    def _enter(self, sequence: SequenceState) -> None:
        request, known, i = sequence.request, self._sequences, sequence.index
        window = self.widest(request)
        kind = -1
        if window:
            key = (request.params.mode, request.params.temperature > 0)
            if key not in self._kinds:
                self._kinds[key] = Acceptance(self._widths)
            kind = list(self._kinds).index(key)
        column = np.flatnonzero(self._widths == window)
        known.whose[i], known.own[i] = (sequence, sequence.num_admissions), 0
        known.counts[:, i] = [getattr(sequence, name) for name in COUNTS]
        known.kind[i], known.free[i] = kind, request.window is None and window > 0
        known.column[i] = -1 if known.free[i] or not len(column) else column[0]
        known.window[i] = 0 if known.free[i] else window
        known.max_tokens[i] = request.params.max_tokens
        known.opens[i] = sequence.num_forwards == 0
        known.choices[i] = known.first_tokens[i] = request.params.mode == "verified"

    def _choose_together(self, indices: np.ndarray, others: np.ndarray) -> None:
        """Chooses the windows of the sequences of one replica.

        Args:
          others: sequences whose windows are fixed.
        """
        assert self.costs is not None, "the costs of forwards must be known first"
        known, widths, n = self._sequences, self._widths, len(indices)
        committed, filled = np.empty((2, n, len(widths)))
        for number, acceptance in enumerate(self._kinds.values()):
            which = known.kind[indices] == number
            committed[which] = acceptance.expected(known.own[indices[which]])
            filled[which] = acceptance.filled(committed[which])
        left = known.max_tokens[indices] - known.counts[0, indices]
        np.minimum(committed, left[:, None], out=committed)
        computed = np.where(widths, widths + np.maximum(filled, 1), 1)
        committed[:, 0] = 1
        now, every = known.column[indices], np.arange(n)
        before = np.where(now > 0, committed[every, np.maximum(now, 0)], known.choices[indices])
        stay = np.flatnonzero(now >= 0)
        committed[stay, now[stay]] *= STAY
        fixed = known.window[others]
        picks = candidates(committed, computed)
        tokens = computed[every, picks].sum(axis=1) + np.where(fixed, 1.25 * fixed + 1, 1).sum()
        drafts = np.where(widths, filled - 1, 0)[every, picks].sum(axis=1)
        seconds = self.costs.expected(tokens, spread(drafts, n))
        if not fixed.any():
            seconds[~picks.any(axis=1)] *= self.costs.windowless
        columns = picks[((committed[every, picks].sum(axis=1) + len(others)) / seconds).argmax()]
        # The first forward of a wider window still has the drafts of the narrower one.
        wider = (columns > now) & (now >= 0)
        known.opens[indices] |= wider
        known.first_tokens[indices[wider]] = before[wider]
        known.column[indices], known.window[indices] = columns, widths[columns]

    def _learn_costs(
        self, indices: np.ndarray, done: Floats, num_run: int, chunk_tokens: int, seconds: float
    ) -> None:
        """Updates costs from the time of a burst and the forwards of its slowest replica."""
        assert self.costs is not None
        known, slots, prompt = self._sequences, done[2], np.maximum(done[3] - done[0], 0)
        replicas = indices // self._num_sequences
        loads = []
        for replica in set(replicas.tolist()):
            inside = replicas == replica
            chunks = min(np.ceil(prompt[inside].sum() / max(chunk_tokens, 1)), num_run)
            tokens = slots[inside].sum() / num_run
            drafts = tokens - done[1][inside] @ (known.window[indices[inside]] + 1) / num_run
            wide = spread(np.maximum(drafts, 0), inside.sum())
            loads.append((tokens, float(wide), prompt[inside].sum(), chunks))
        windowless = not known.window[indices].any()
        self.costs.observe(*max(loads), num_run, seconds, windowless=windowless)


def spread(drafts: Floats, n: int) -> Floats:
    """Returns the spread of a forward's tokens around their average, with ``drafts`` in n windows
    on average: a window mostly has none, or nearly as many as it can."""
    return 0.85 * drafts / n**0.5


def candidates(committed: Floats, computed: Floats) -> np.ndarray:
    """Returns C candidates, each a width for every one of n sequences, int ``[C, n]``.

    One candidate per price of a computed token, with the width that pays best for each sequence;
    and one per width, the same for all. If cost were linear in tokens, one of them would be the
    best choice; the static sizes of forwards make it slightly worse.

    Args:
      committed, computed: ``[n, K]``, tokens of a forward with each width.
    """
    alike = np.repeat(np.arange(committed.shape[1])[:, None], len(committed), axis=1)
    if len(committed) == 1:
        return alike
    picks = (committed - PRICES[:, None, None] * computed).argmax(axis=2)
    return np.concatenate([picks, alike])


class _Sequences:
    """Holds what is remembered of the sequence at each index, over all replicas.

    Attributes:
      whose: the sequence at the index, and the number of its admission.
      own: ``[size, M]``, its evidence for `Acceptance`.
      free: bool, whether its window is chosen here.
      kind: the number of its kind; −1 for a sequence that never has a window.
      column, window: the column of its width, −1 for another width; and that width.
      opens: bool, whether its next forward is the first of a window.
      choices: tokens that a forward without drafts commits: 1, or 0 in mode "paper".
      first_tokens: tokens that the first forward of the window commits, as far as is known.
      counts: ``[4, size]``, `COUNTS` after the last burst.
    """

    def __init__(self, size: int):
        self.whose: list[tuple[SequenceState, int] | None] = [None] * size
        self.own = np.zeros((size, NUM_TYPES))
        self.free, self.opens = np.zeros((2, size), bool)
        self.kind, self.column, self.window = np.full((3, size), -1, np.int64)
        self.max_tokens = np.zeros(size, np.int64)
        self.choices, self.first_tokens = np.zeros((2, size))
        self.counts = np.zeros((len(COUNTS), size), np.int64)
