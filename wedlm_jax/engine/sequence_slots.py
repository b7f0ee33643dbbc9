"""What each sequence did in a burst, and how long the burst was to take."""

from __future__ import annotations

import dataclasses

import numpy as np

from wedlm_jax.engine.acceptance import NUM_TYPES, Floats
from wedlm_jax.engine.burst import Report, Request
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.engine.width_by_load import slots_spread


@dataclasses.dataclass(frozen=True)
class Progress:
    """What sequences have done, ``[n]`` each.

    Attributes:
      tokens, forwards, slots: committed tokens, decode forwards, active slots over these.
      prompt: tokens computed beside these.
    """

    tokens: np.ndarray
    forwards: np.ndarray
    slots: np.ndarray
    prompt: np.ndarray


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What sequences with windows have done since they were last looked at, ``[n]`` each.

    Forwards that open a window are left out: they have no drafts to commit.

    Attributes:
      index: int, their places; −1 of those that are gone.
      kind, column: int, as in `SequenceSlots`.
      own: ``[n, M]``, what was known of each before.
      tokens, forwards, slots: float.
    """

    index: np.ndarray
    kind: np.ndarray
    column: np.ndarray
    own: Floats
    tokens: Floats
    forwards: Floats
    slots: Floats


class SequenceSlots:
    """What is remembered of the sequence at each index, of all replicas.

    Args:
      size: indices.

    Attributes:
      own: ``[size, M]``, evidence for `wedlm_jax.engine.acceptance.Acceptance`.
      free: bool, whether its window is to be chosen.
      kind: int, which of the kinds of sequences it is; −1 for one that never has a window.
      column, window: int, its width, and which of the widths that is; −1 for none of them.
    """

    def __init__(self, size: int):
        self.own = np.zeros((size, NUM_TYPES))
        self.free, self._opens = np.zeros((2, size), bool)
        self.kind, self.column, self.window = np.full((3, size), -1, np.int64)
        self._max_tokens, self._first_tokens = np.zeros((2, size), np.int64)
        self._counts = np.zeros((size, 4), np.int64)
        self._sequences: list[SequenceState | None] = [None] * size
        self._requests: list[Request | None] = [None] * size
        self._gone: list[tuple[SequenceState, np.ndarray, np.ndarray]] = []

    @property
    def size(self) -> int:
        return len(self._requests)

    def grown(self, size: int) -> SequenceSlots:
        """Returns the same with more indices."""
        wider = SequenceSlots(size)
        for name, value in vars(self).items():
            if name != "_gone":
                getattr(wider, name)[: self.size] = value
        wider._gone = self._gone
        return wider

    def holds(self, sequence: SequenceState) -> bool:
        """Says whether the sequence was at its index before."""
        return self._requests[sequence.index] is sequence.request

    def enter(self, sequence: SequenceState, kind: int, *, free: bool) -> None:
        """Puts a sequence in the place of the one that was at its index."""
        i, request = sequence.index, sequence.request
        before = self._sequences[i]
        if before is not None and self.column[i] > 0:
            self._gone.append((before, self._numbers(i), self.own[i].copy()))
        self._sequences[i], self._requests[i] = sequence, request
        self.own[i], self._counts[i] = 0, _counts(sequence)
        self.kind[i], self.free[i], self.column[i], self.window[i] = kind, free, -1, 0
        self._max_tokens[i] = request.params.max_tokens
        # The forward that opens a window commits its own choice, or nothing in mode "paper".
        self._first_tokens[i] = request.params.mode == "verified"
        self._opens[i] = sequence.num_forwards == 0

    def _numbers(self, i: int | np.ndarray) -> np.ndarray:
        """int ``[8]`` or ``[8, n]``: kind, column, window, opening, its tokens, three counts."""
        opening = self._opens[i], self._first_tokens[i]
        return np.array(
            [self.kind[i], self.column[i], self.window[i], *opening, *self._counts[i].T[:3]]
        )

    def set_windows(self, rows: np.ndarray, columns: np.ndarray, windows: np.ndarray) -> None:
        """Gives the sequences at ``rows [n]`` windows; what they did before must be learnt from
        already."""
        self._opens[rows] |= (self.column[rows] == 0) & (windows > 0)
        self.column[rows], self.window[rows] = columns, windows

    def left(self, rows: np.ndarray) -> np.ndarray:
        """int ``[n]``: tokens that each may still commit."""
        left: np.ndarray = self._max_tokens[rows] - self._counts[rows, 0]
        return left

    def progress(self, rows: np.ndarray, report: Report) -> Progress:
        """Says what the sequences at ``rows [n]`` have done up to a report since the last look."""
        then = self._counts[rows].T
        names = "num_output", "num_forwards", "num_token_instances", "num_computed"
        tokens, forwards, slots, computed = (
            np.asarray(getattr(report, name))[rows] - old
            for name, old in zip(names, then, strict=True)
        )
        return Progress(tokens, forwards, slots, np.maximum(computed - tokens, 0))

    def evidence(self) -> Evidence:
        """Returns what was not looked at yet, once."""
        sequences = [one for one in self._sequences if one is not None]
        rows = np.array([i for i, one in enumerate(self._sequences) if one is not None], np.int64)
        gone, self._gone = self._gone, []
        now = np.array([_counts(one) for one in [*sequences, *(each[0] for each in gone)]])
        now = now.reshape(-1, 4)
        numbers = np.concatenate(
            [self._numbers(rows), *(each[1][:, None] for each in gone)], axis=1
        )
        own = np.concatenate([self.own[rows], *(each[2][None] for each in gone)])
        kind, column, window, opens, first, *then = numbers
        tokens, forwards, slots = (now[:, i] - then[i] for i in range(3))
        opened = opens * (forwards > 0)
        self._opens[rows] &= forwards[: len(rows)] == 0
        self._counts[rows] = now[: len(rows)]
        for i, one in zip(rows.tolist(), sequences, strict=True):
            if one.index != i:  # finished, or put back
                self._sequences[i] = self._requests[i] = None
        index = np.concatenate([rows, np.full(len(gone), -1)])
        tokens, forwards = tokens - opened * first, forwards - opened
        slots = slots - opened * window
        seen = np.flatnonzero((column > 0) & (forwards > 0))
        return Evidence(
            index[seen],
            kind[seen],
            column[seen],
            own[seen],
            np.maximum(tokens[seen], 0).astype(float),
            forwards[seen].astype(float),
            slots[seen].astype(float),
        )


def _counts(sequence: SequenceState) -> tuple[int, int, int, int]:
    return (
        sequence.num_output,
        sequence.num_forwards,
        sequence.num_token_instances,
        sequence.num_computed,
    )


def stretches(
    done: Progress, windows: np.ndarray, chunk_tokens: int, num_run: int
) -> tuple[Floats, Floats, Floats, bool]:
    """Cuts a burst where sequences finish.

    Args:
      windows: int ``[n]``.
      chunk_tokens: tokens of prompts that a forward may compute.
      num_run: forwards of the burst.

    Returns:
      for each stretch the mean tokens of its forwards, their standard deviation, and how many
      forwards; and whether the first is of forwards with chunks of prompts.
    """
    order = np.argsort(-done.forwards, kind="stable")
    forwards = done.forwards[order]
    each = np.maximum(done.slots[order] / np.maximum(forwards, 1), 1)
    filled = each - windows[order]
    variance = np.where(windows[order] > 0, slots_spread(filled) ** 2, 0).cumsum()
    tokens = each.cumsum()
    lengths = forwards - np.append(forwards[1:], 0)
    kept = np.flatnonzero(lengths)[::-1]  # in order of time: all sequences first
    tokens, spread, lengths = tokens[kept], np.sqrt(variance[kept]), lengths[kept].astype(float)
    prompt = float(done.prompt.sum())
    chunks = max(-(-prompt // chunk_tokens), num_run - float(lengths.sum()), 0.0)
    if not prompt or not chunks:
        return tokens, spread, lengths, False
    beside = tokens[0] if len(tokens) else 0.0
    if len(lengths):
        # Windows run beside the chunks, but for those that are open only behind them.
        lengths[0] = max(lengths[0] - max(chunks + float(lengths.sum()) - num_run, 0), 0)
    return (
        np.insert(tokens, 0, beside + prompt / chunks),
        np.insert(spread, 0, 0.0),
        np.insert(lengths, 0, chunks),
        True,
    )
