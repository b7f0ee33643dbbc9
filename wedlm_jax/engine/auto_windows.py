"""Windows by load: wide where the device waits for memory, narrow where it computes.

A burst with windows W_i decodes

    Σ E_i(W_i) / cost(Σ T_i(W_i))

tokens a second: E_i, the tokens that a forward of sequence i commits, from what it and others like
it have committed (`wedlm_jax.engine.acceptance`); T_i, the tokens that it computes; the cost of a
forward from a table (`wedlm_jax.engine.cost`). The windows with the most are taken, sequence by
sequence. With W = 0 all are known: E = T = 1. Autoregressive decoding teaches nothing of wider
windows, though, nor one window all of another. So a small share of the time goes into tries, where
one would pay if the text were easier than most that was seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from wedlm_jax.engine.acceptance import Acceptance
from wedlm_jax.engine.burst import Burst, Report, Request
from wedlm_jax.engine.cost import CostTable
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.engine.sequence_slots import SequenceSlots, forward_tokens
from wedlm_jax.engine.width_by_load import Load, WidthsByLoad, window_tokens

WIDTHS = (0, 2, 4, 8, 16, 32, 64, 128)
"""Windows that may be chosen."""
TRY_SHARE = 0.01
"""Share of the time that tries may cost."""
FREE_TRIES = 3
"""Tries before that counts: nothing is known at first."""
SAVED_UP = 30
"""Bursts whose share may be saved up for later tries."""
FIRST_LOOKS = 32
"""Bursts at the beginning after each of which windows are chosen anew."""
LOOK_SECONDS, LOOK_SHARE = 0.03, 0.01
"""Later they are after so long at least, and so seldom that it takes no more than this share of the
time."""
COSTS_EVERY = 2
"""Looks from one to the next after which the time of a burst is compared with what it was to
take."""
OTHER_LOAD = 1.3
"""They also are when there are so many times more sequences than there were, or fewer."""
PROMPT_DOUBT = 0.3
"""How wrong the expected time of forwards with chunks of prompts may be: no row of them passes the
head."""


class AutoWindows:
    """Chooses the windows of requests that name none; a `wedlm_jax.engine.windows.WindowChoice`.

    Args:
      widest: the widest window that may be chosen, at least 2.
      num_sequences: N, of each replica.
      costs: seconds of a forward; may also be set later, but before the first burst.
      clock: tells seconds.
    """

    def __init__(
        self,
        widest: int,
        num_sequences: int,
        costs: CostTable | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._widest, self._num_sequences, self.costs = widest, num_sequences, costs
        self._clock, self._look_seconds = clock, 0.0
        self._widths = np.array([*(w for w in WIDTHS if w < widest), widest])
        self._kinds: dict[tuple[str, bool], Acceptance] = {}
        self._slots = SequenceSlots(0)
        self._rows = np.zeros(0, np.int64)
        self._usual: dict[int, int] = {}
        self._looks, self._since, self._load = 0, 0.0, 0
        self._credit, self._tries, self._try_loss = 0.0, 0, 0.0
        self._usual_seconds = 0.0

    # --- the scheduler's questions --------------------------------------------------------

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get."""
        if request.params.mode == "ar":
            return 0
        return self._widest if request.window is None else request.window

    def choose(self, running: Sequence[SequenceState]) -> Sequence[int]:
        """Returns the window of each sequence in the next burst.

        All are weighed against each other now and then; in between, sequences keep theirs, and
        new ones get what such ones usually get.
        """
        indices = [sequence.index for sequence in running]
        if max(indices, default=-1) >= self._slots.size:
            self._slots = self._slots.grown(max(indices) + 1)
        slots = self._slots
        new = [one for one in running if not slots.holds(one)]
        for sequence in new:
            self._enter(sequence)
        rows = self._rows = np.array(indices, np.int64)
        if self._is_due(rows, new):
            self._look(rows)
        else:
            for sequence in new:
                i = sequence.index
                if slots.free[i]:
                    slots.column[i] = self._usual[slots.kind[i]]
                    slots.window[i] = self._widths[slots.column[i]]
        return slots.window[rows].tolist()  # type: ignore[no-any-return]

    def observe(self, burst: Burst, report: Report, seconds: float) -> None:
        """Learns what a burst has committed, and how long it took."""
        often = self._looks <= FIRST_LOOKS or self._looks % COSTS_EVERY == 0 or self._try_loss > 0
        if not self._since and often and seconds > 0:  # the first burst after a look
            self._learn_costs(burst, report, seconds)
        self._since += seconds
        usual = self._usual_seconds or seconds
        self._usual_seconds = usual + 0.1 * (min(seconds, 3 * usual) - usual)
        self._credit += TRY_SHARE * min(seconds, 3 * usual)
        self._credit = min(self._credit, SAVED_UP * TRY_SHARE * self._usual_seconds)
        if self._try_loss:
            self._tries += 1
            if self._tries > FREE_TRIES:
                # It also takes a look to begin and one to end.
                self._credit -= self._try_loss * self._usual_seconds + 2 * self._look_seconds

    def _is_due(self, rows: np.ndarray, new: Sequence[SequenceState]) -> bool:
        """Whether all windows are to be chosen anew."""
        if self._looks < FIRST_LOOKS or self._try_loss:
            return True
        if self._since > max(LOOK_SECONDS, self._look_seconds / LOOK_SHARE):
            return True
        low, high = sorted((self._load, len(rows)))
        if high > OTHER_LOAD * low:
            return True
        slots = self._slots
        return any(slots.free[o.index] and slots.kind[o.index] not in self._usual for o in new)

    # --- who decodes ------------------------------------------------------------------------

    def _enter(self, sequence: SequenceState) -> None:
        request, slots, i = sequence.request, self._slots, sequence.index
        window = self.widest(request)
        kind = -1
        if window:
            key = (request.params.mode, request.params.temperature > 0)
            if key not in self._kinds:
                self._kinds[key] = Acceptance(self._widths)
            kind = list(self._kinds).index(key)
        free = request.window is None and window > 0
        slots.enter(sequence, kind, free=free)
        if not free:
            column = int(np.searchsorted(self._widths, window))
            known = column < len(self._widths) and self._widths[column] == window
            slots.column[i], slots.window[i] = column if known else -1, window

    def _by_kind(self, kinds: np.ndarray) -> list[tuple[int, Acceptance, np.ndarray]]:
        """The kinds of sequences that are among ``kinds [n]``, and the places of each."""
        found = [
            (kind, acceptance, np.flatnonzero(kinds == kind))
            for kind, acceptance in enumerate(self._kinds.values())
        ]
        return [each for each in found if len(each[2])]

    # --- choosing ---------------------------------------------------------------------------

    def _look(self, rows: np.ndarray) -> None:
        """Learns from all bursts since the last look, and chooses all windows anew."""
        started = self._clock()
        self._learn_acceptance()
        slots, count = self._slots, self._num_sequences
        self._looks += 1
        self._since, self._load, self._try_loss = 0.0, len(rows), 0.0
        replicas = rows // count
        for replica in set(replicas.tolist()):
            inside = rows[replicas == replica]
            free = slots.free[inside]
            if free.any():
                self._choose_together(inside[free], inside[~free])
        self._look_seconds += 0.2 * (self._clock() - started - self._look_seconds)

    def _choose_together(self, rows: np.ndarray, others: np.ndarray) -> None:
        """Chooses the windows of the sequences of one replica.

        Args:
          others: sequences whose windows are fixed.
        """
        slots, widths = self._slots, self._widths
        assert self.costs is not None, "the costs of forwards must be known first"
        count = len(rows)
        expected, hoped, filled = np.empty((3, count, len(widths)))
        kinds = self._by_kind(slots.kind[rows])
        for _, acceptance, which in kinds:
            expected[which] = acceptance.expected(slots.own[rows[which]])
            hoped[which] = acceptance.hoped()
            filled[which] = acceptance.filled_slots
        left = slots.left(rows)[:, None]
        np.minimum(expected, left, out=expected)
        np.minimum(hoped, left, out=hoped)
        fixed = slots.window[others]
        choice = WidthsByLoad(
            Load(expected, widths, filled),
            Load(hoped, widths, filled),
            base_committed=float(len(others)),
            base_tokens=window_tokens(fixed, 1 + fixed / 4).sum(axis=1),
            costs=self.costs,
        )
        columns, price = choice.best(slots.column[rows])
        for kind, acceptance, which in kinds:
            unknown = Load(acceptance.expected_of_new(), widths, acceptance.filled_slots[None])
            self._usual[kind] = choice.usual(unknown, columns[which], price)
        best = columns
        if self._credit > 0 or self._tries < FREE_TRIES:
            tried = choice.attempt(columns, self._least_known(rows))
            if tried is not None:
                columns, loss = tried
                self._try_loss = max(self._try_loss, loss, 1e-6)
        now = np.maximum(slots.column[rows], 0)
        slots.set_windows(rows, columns, widths[columns], expected[np.arange(count), now])
        slots.set_tried(rows[columns != best])

    def _least_known(self, rows: np.ndarray) -> int:
        """Which of ``rows`` may be tried: one of which little is known, with much ahead of it."""
        unknown = self._slots.own[rows].min(axis=1) == 0
        return int((self._slots.left(rows) * (1 + unknown)).argmax())

    # --- learning ---------------------------------------------------------------------------

    def _learn_acceptance(self) -> None:
        slots, evidence = self._slots, self._slots.evidence()
        for acceptance in self._kinds.values():
            acceptance.fade()
        for _, acceptance, which in self._by_kind(evidence.kind):
            own = evidence.own[which]
            acceptance.learn(
                own,
                evidence.column[which],
                evidence.tokens[which],
                evidence.forwards[which],
                evidence.slots[which],
                evidence.tried[which],
            )
            index = evidence.index[which]
            slots.own[index[index >= 0]] = own[index >= 0]

    def _learn_costs(self, burst: Burst, report: Report, seconds: float) -> None:
        """Compares the time of a burst with that of its forwards, of the slowest replica."""
        assert self.costs is not None
        longest, slowest, share = 0.0, None, 0.0
        rows = self._rows[burst.capacity[self._rows] > 0]  # some may be put back before they run
        replicas = rows // self._num_sequences
        for replica in set(replicas.tolist()):
            own = rows[replicas == replica]
            done, windows = self._slots.progress(own, report), self._slots.window[own]
            tokens, chunks = forward_tokens(done, windows, burst.chunk_tokens, report.num_run)
            took = float(self.costs.expected(tokens).sum())
            if took > longest:
                longest, slowest, share = took, tokens, chunks
        if slowest is not None:
            ones = np.ones(slowest.shape[1])
            self.costs.observe(slowest, ones, seconds, PROMPT_DOUBT * share)
