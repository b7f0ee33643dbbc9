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

import dataclasses
from collections.abc import Sequence

import numpy as np

from wedlm_jax.engine.acceptance import NUM_TYPES, Acceptance, Floats
from wedlm_jax.engine.burst import Burst, Report, Request
from wedlm_jax.engine.cost import CostTable
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.engine.width_by_load import Load, WidthsByLoad, slots_spread

WIDTHS = (0, 2, 4, 8, 16, 32, 64, 128)
"""Windows that may be chosen."""
TRY_SHARE = 0.01
"""Share of the time that tries may cost."""
FREE_TRIES = 3
"""Tries before that counts: nothing is known at first."""
SAVED_UP = 30
"""Bursts whose share may be saved up for later tries."""
PROMPT_DOUBT = 0.5
"""How wrong the expected time of forwards with chunks of prompts may be: no row of them passes the
head."""


@dataclasses.dataclass(frozen=True)
class _Progress:
    """What sequences did in a burst, ``[n]`` each.

    Attributes:
      begun: bool, whether their first decode forward was in it.
      tokens, forwards, slots: committed tokens, decode forwards, active slots over these.
      prompt: tokens computed beside these.
    """

    begun: np.ndarray
    tokens: np.ndarray
    forwards: np.ndarray
    slots: np.ndarray
    prompt: np.ndarray


class _Slots:
    """What is remembered of the sequence at each index, of all replicas.

    Args:
      size: indices.
    """

    def __init__(self, size: int):
        self.requests: list[Request | None] = [None] * size
        self.own = np.zeros((size, NUM_TYPES))
        self.free, self.switched = np.zeros((2, size), bool)
        self.kind, self.column, self.window = np.full((3, size), -1, np.int64)
        self.outputs, self.forwards, self.instances, self.computed = np.zeros((4, size), np.int64)
        self.max_tokens, self.first_tokens = np.zeros((2, size), np.int64)

    def grown(self, size: int) -> _Slots:
        """Returns the same with more indices."""
        wider = _Slots(size)
        for name, value in vars(self).items():
            getattr(wider, name)[: len(value)] = value
        return wider

    def enter(
        self, sequence: SequenceState, kind: int, free: bool, window: int, column: int
    ) -> None:
        """Forgets who was at the sequence's index."""
        i, request = sequence.index, sequence.request
        self.requests[i], self.own[i] = request, 0
        self.kind[i], self.free[i], self.window[i], self.column[i] = kind, free, window, column
        self.switched[i] = False
        self.outputs[i], self.computed[i] = sequence.num_output, sequence.num_computed
        self.forwards[i] = sequence.num_forwards
        self.instances[i] = sequence.num_token_instances
        self.max_tokens[i] = request.params.max_tokens
        # The forward that opens a window commits its own choice, or nothing in mode "paper".
        self.first_tokens[i] = request.params.mode == "verified"

    def progress(self, rows: np.ndarray, report: Report) -> _Progress:
        """Takes in a burst; says what the sequences at ``rows`` did in it."""
        begun = self.forwards[rows] == 0
        news = []
        for old, new in (
            (self.outputs, report.num_output),
            (self.forwards, report.num_forwards),
            (self.instances, report.num_token_instances),
            (self.computed, report.num_computed),
        ):
            now = np.asarray(new)[rows]
            news.append(now - old[rows])
            old[rows] = now
        tokens, forwards, instances, computed = news
        return _Progress(begun, tokens, forwards, instances, np.maximum(computed - tokens, 0))


def _stretches(
    done: _Progress, windows: np.ndarray, chunk_tokens: int, num_run: int
) -> tuple[Floats, Floats, Floats, bool]:
    """Cuts a burst where sequences finish.

    Returns:
      for each stretch the mean tokens of its forwards, their standard deviation, and how many
      they were; and whether the first is of forwards with chunks of prompts.
    """
    order = np.argsort(-done.forwards, kind="stable")
    forwards = done.forwards[order]
    each = np.maximum(done.slots[order] / np.maximum(forwards, 1), 1)
    wide = windows[order] > 0
    spread = np.where(wide, slots_spread(each - windows[order]), 0)
    tokens, variance = np.cumsum(each), np.cumsum(spread**2)
    lengths = forwards - np.append(forwards[1:], 0)
    kept = np.flatnonzero(lengths)[::-1]  # in order of time: all sequences first
    tokens, spread, lengths = tokens[kept], np.sqrt(variance[kept]), lengths[kept].astype(float)
    prompt = float(done.prompt.sum())
    chunks = max(-(-prompt // chunk_tokens), float(num_run) - lengths.sum(), 0.0)
    if not prompt or not chunks:
        return tokens, spread, lengths, False
    beside = tokens[0] if len(tokens) else 0.0
    if len(lengths):
        # Windows run beside the chunks, but for those that are open only behind them.
        lengths[0] = max(lengths[0] - max(chunks + lengths.sum() - num_run, 0), 0)
    return (
        np.append(beside + prompt / chunks, tokens),
        np.append(0.0, spread),
        np.append(chunks, lengths),
        True,
    )


class AutoWindows:
    """Chooses the windows of requests that name none; a `wedlm_jax.engine.windows.WindowChoice`.

    Args:
      widest: the widest window that may be chosen, at least 2.
      num_sequences: N, of each replica.
      costs: seconds of a forward; may also be set later, but before the first burst.
    """

    def __init__(self, widest: int, num_sequences: int, costs: CostTable | None = None):
        self._widest, self._num_sequences, self.costs = widest, num_sequences, costs
        self._widths = np.array([*(w for w in WIDTHS if w < widest), widest])
        self._kinds: dict[tuple[str, bool], Acceptance] = {}
        self._slots = _Slots(0)
        self._rows = np.zeros(0, np.int64)
        self._credit, self._tries, self._try_loss = 0.0, 0, 0.0
        self._usual_seconds = 0.0

    # --- the scheduler's questions --------------------------------------------------------

    def widest(self, request: Request) -> int:
        """Returns the widest window that a request may ever get."""
        if request.params.mode == "ar":
            return 0
        return self._widest if request.window is None else request.window

    def choose(self, running: Sequence[SequenceState]) -> Sequence[int]:
        """Returns the window of each sequence in the next burst."""
        slots, indices = self._slots, [sequence.index for sequence in running]
        if max(indices, default=-1) >= len(slots.requests):
            slots = self._slots = slots.grown(max(indices) + 1)
        for index, sequence in zip(indices, running, strict=True):
            if slots.requests[index] is not sequence.request:
                self._enter(sequence)
        rows = self._rows = np.array(indices, np.int64)
        self._try_loss = 0.0
        count = self._num_sequences
        for first in {index // count * count for index in indices}:
            inside = slots.free[rows] & (rows >= first) & (rows < first + count)
            free = rows[inside]
            if len(free):
                others = rows[~slots.free[rows] & (rows >= first) & (rows < first + count)]
                self._choose_together(free, others)
        return slots.window[rows].tolist()  # type: ignore[no-any-return]

    def observe(self, burst: Burst, report: Report, seconds: float) -> None:
        """Learns what a burst has committed, and how long it took."""
        slots = self._slots
        rows = self._rows[burst.capacity[self._rows] > 0]
        if not len(rows):
            return
        done = slots.progress(rows, report)
        self._learn_costs(burst, report, rows, done, seconds)
        self._learn_acceptance(rows, done)
        self._usual_seconds += 0.1 * (min(seconds, 3 * self._usual_seconds) - self._usual_seconds)
        self._credit += TRY_SHARE * seconds
        self._credit = min(self._credit, SAVED_UP * TRY_SHARE * self._usual_seconds)
        if self._try_loss:
            self._tries += 1
            if self._tries > FREE_TRIES:
                self._credit -= self._try_loss * seconds

    # --- who decodes ------------------------------------------------------------------------

    def _enter(self, sequence: SequenceState) -> None:
        request, slots = sequence.request, self._slots
        window = self.widest(request)
        column = int(np.searchsorted(self._widths, window))
        known = column < len(self._widths) and self._widths[column] == window
        kind = -1
        if window and known:
            key = (request.params.mode, request.params.temperature > 0)
            if key not in self._kinds:
                self._kinds[key] = Acceptance(self._widths)
            kind = list(self._kinds).index(key)
        free = request.window is None and window > 0
        slots.enter(sequence, kind, free, window, column if known and not free else -1)

    def _acceptances(self, rows: np.ndarray) -> list[tuple[Acceptance, np.ndarray]]:
        """The kinds of sequences, and which of ``rows`` are of each."""
        kinds = self._slots.kind[rows]
        all_kinds = list(self._kinds.values())
        if len(all_kinds) == 1:
            return [(all_kinds[0], np.arange(len(rows)))]
        return [
            (acceptance, np.flatnonzero(kinds == kind))
            for kind, acceptance in enumerate(all_kinds)
            if (kinds == kind).any()
        ]

    # --- choosing ---------------------------------------------------------------------------

    def _choose_together(self, rows: np.ndarray, others: np.ndarray) -> None:
        """Chooses the windows of the sequences of one replica.

        Args:
          others: sequences whose windows are fixed.
        """
        slots, widths = self._slots, self._widths
        assert self.costs is not None, "the costs of forwards must be known first"
        count = len(rows)
        expected, hoped = np.empty((2, count, len(widths)))
        filled = np.empty((count, len(widths)))
        for acceptance, which in self._acceptances(rows):
            expected[which] = acceptance.expected(slots.own[rows[which]])
            hoped[which] = acceptance.hoped()
            filled[which] = acceptance.filled_slots
        left = (slots.max_tokens[rows] - slots.outputs[rows])[:, None]
        np.minimum(expected, left, out=expected)
        np.minimum(hoped, left, out=hoped)
        fixed = slots.window[others]
        choice = WidthsByLoad(
            Load(expected, widths, filled),
            Load(hoped, widths, filled),
            base_committed=float(len(others)),
            base_tokens=float(np.where(fixed == 0, 1, fixed * 1.25 + 1).sum()),
            costs=self.costs,
        )
        plan = choice.best(slots.column[rows])
        if self._credit > 0 or self._tries < FREE_TRIES:
            tried = choice.attempt(plan, self._least_known(rows))
            if tried is not None:
                plan, loss = tried
                self._try_loss = max(self._try_loss, loss)
        windows = widths[plan]
        slots.switched[rows] = (slots.column[rows] == 0) & (windows > 0)
        slots.column[rows], slots.window[rows] = plan, windows

    def _least_known(self, rows: np.ndarray) -> int:
        """Which of ``rows`` may be tried: one of which little is known, with much ahead of it."""
        own = self._slots.own[rows]
        unknown = own.min(axis=1) == 0
        left = self._slots.max_tokens[rows] - self._slots.outputs[rows]
        return int((left * (1 + unknown)).argmax())

    # --- learning ---------------------------------------------------------------------------

    def _learn_acceptance(self, rows: np.ndarray, done: _Progress) -> None:
        slots = self._slots
        for acceptance in self._kinds.values():
            acceptance.fade()
        windows = slots.window[rows]
        # The forward that ends a prompt, or opens a window, finds no drafts to commit.
        opening = (done.begun | slots.switched[rows]) & (done.forwards > 0)
        forwards = done.forwards - opening
        tokens = done.tokens - opening * slots.first_tokens[rows]
        used = done.slots - opening * windows
        seen = (slots.column[rows] > 0) & (forwards > 0) & (slots.kind[rows] >= 0)
        slots.switched[rows] = False
        if not seen.any():
            return
        here = np.flatnonzero(seen)
        for acceptance, which in self._acceptances(rows[here]):
            some = here[which]
            own = slots.own[rows[some]]
            acceptance.learn(
                own,
                slots.column[rows[some]],
                np.maximum(tokens[some], 0.0),
                forwards[some].astype(float),
                used[some],
            )
            slots.own[rows[some]] = own

    def _learn_costs(
        self, burst: Burst, report: Report, rows: np.ndarray, done: _Progress, seconds: float
    ) -> None:
        """Compares the time of a burst with that of its forwards, of the slowest replica."""
        assert self.costs is not None
        longest, slowest = 0.0, None
        replica = rows // self._num_sequences
        for number in np.unique(replica):
            inside = replica == number
            own = dataclasses.replace(
                done, **{name: value[inside] for name, value in vars(done).items()}
            )
            windows = self._slots.window[rows[inside]]
            stretches = _stretches(own, windows, burst.chunk_tokens, report.num_run)
            took = float(self.costs.expected(stretches[0], stretches[1]) @ stretches[2])
            if took > longest:
                longest, slowest = took, stretches
        if slowest is None or seconds <= 0:
            return
        tokens, spread, forwards, prompts = slowest
        first = float(self.costs.expected(tokens[:1], spread[:1])[0] * forwards[0])
        doubt = PROMPT_DOUBT * first / longest if prompts else 0.0
        self.costs.observe(tokens, spread, forwards, seconds, doubt)
