"""What each sequence did in a burst, and how long the burst was to take."""

from __future__ import annotations

import dataclasses

import numpy as np

from wedlm_jax.engine.acceptance import NUM_TYPES, OWN_MEMORY, Floats
from wedlm_jax.engine.burst import Report, Request
from wedlm_jax.engine.cost import ForwardTokens
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.engine.width_by_load import window_tokens


@dataclasses.dataclass(frozen=True)
class Progress:
    """What sequences have done, ``[n]`` each.

    Attributes:
      tokens, forwards, slots: committed tokens, decode forwards, active slots over these.
      prompt: tokens computed beside these.
      finished: bool.
    """

    tokens: np.ndarray
    forwards: np.ndarray
    slots: np.ndarray
    prompt: np.ndarray
    finished: np.ndarray


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What sequences with windows have done since they were last looked at, ``[n]`` each.

    Forwards that open a window are left out: they have no drafts to commit.

    Attributes:
      index: int, their places; −1 of those that are gone.
      kind, column: int, as in `SequenceSlots`.
      own: ``[n, M]``, what was known of each before.
      tokens, forwards, slots: float.
      tried: bool, whether the width was a try.
    """

    index: np.ndarray
    kind: np.ndarray
    column: np.ndarray
    own: Floats
    tokens: Floats
    forwards: Floats
    slots: Floats
    tried: np.ndarray


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
        self.free, self._opens, self._tried = np.zeros((3, size), bool)
        self.kind, self.column, self.window = np.full((3, size), -1, np.int64)
        self._max_tokens = np.zeros(size, np.int64)
        self._first_tokens = np.zeros(size)
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
        self._opens[i] = sequence.num_forwards == 0
        self._first_tokens[i] = _first_tokens(request)

    def _numbers(self, i: int | np.ndarray) -> np.ndarray:
        """``[9]`` or ``[9, n]``: kind, column, window, whether it is a try, whether it opens, its
        tokens, three counts."""
        which = self.kind[i], self.column[i], self.window[i], self._tried[i]
        opening = self._opens[i], self._first_tokens[i]
        return np.array([*which, *opening, *self._counts[i].T[:3]])

    def set_windows(
        self, rows: np.ndarray, columns: np.ndarray, windows: np.ndarray, tokens: Floats
    ) -> None:
        """Gives the sequences at ``rows [n]`` windows; what they did before must be learnt from
        already.

        Args:
          tokens: ``[n]``, that a forward of each has committed on average before.
        """
        self._tried[rows] = False
        # The first forward of a wider window has the drafts of the one before.
        wider = np.flatnonzero((columns > self.column[rows]) & (self.column[rows] >= 0))
        for j in wider.tolist():
            i, request = rows[j], self._requests[rows[j]]
            self._opens[i] = True
            self._first_tokens[i] = tokens[j] if self.column[i] else _first_tokens(request)
        self.column[rows], self.window[rows] = columns, windows

    def set_tried(self, rows: np.ndarray) -> None:
        """Says that these sequences have their windows only to learn from them."""
        self._tried[rows] = True

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
        prompt = np.maximum(computed - tokens, 0)
        return Progress(tokens, forwards, slots, prompt, np.asarray(report.finished)[rows])

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
        kind, column, window, tried, opens, first, *then = numbers
        tokens, forwards, slots = (now[:, i] - then[i] for i in range(3))
        opened = opens * (forwards > 0)
        self._opens[rows] &= forwards[: len(rows)] == 0
        self._counts[rows] = now[: len(rows)]
        # Without a window there is no evidence, and what was known of the text grows old.
        plain = np.flatnonzero(column[: len(rows)] == 0)
        self.own[rows[plain]] *= np.exp(-forwards[plain] / OWN_MEMORY)[:, None]
        for i, one in zip(rows.tolist(), sequences, strict=True):
            if one.index != i:  # finished, or put back
                self._sequences[i] = self._requests[i] = None
        index = np.concatenate([rows, np.full(len(gone), -1)])
        tokens, forwards = tokens - opened * first, forwards - opened
        slots = slots - opened * (window + first)
        seen = np.flatnonzero((column > 0) & (forwards > 0))
        return Evidence(
            index[seen],
            kind[seen].astype(int),
            column[seen].astype(int),
            own[seen],
            np.maximum(tokens[seen], 0).astype(float),
            forwards[seen].astype(float),
            slots[seen].astype(float),
            tried[seen] > 0,
        )


def _first_tokens(request: Request | None) -> int:
    """Tokens of the forward that opens a window: its own choice, or nothing in mode "paper"."""
    return int(request is not None and request.params.mode == "verified")


def _counts(sequence: SequenceState) -> tuple[int, int, int, int]:
    return (
        sequence.num_output,
        sequence.num_forwards,
        sequence.num_token_instances,
        sequence.num_computed,
    )


def forward_tokens(
    done: Progress, windows: np.ndarray, chunk_tokens: int, num_run: int
) -> tuple[ForwardTokens, float]:
    """Says how many tokens each forward of a burst may have had.

    Sequences that have finished ran first, the others last; prompts were computed first.

    Args:
      windows: int ``[n]``.
      chunk_tokens: tokens of prompts that a forward may compute.
      num_run: F, forwards of the burst.

    Returns:
      ``[4, F]``, and the share of the forwards that had chunks of prompts.
    """
    forwards = np.minimum(done.forwards, num_run)
    each = window_tokens(windows, done.slots / np.maximum(forwards, 1) - windows)
    prompt = float(done.prompt.sum())
    chunks = min(-(-int(prompt) // chunk_tokens), num_run)
    first = np.where(done.prompt > 0, max(chunks - 1, 0), 0)
    first = np.where(done.finished, np.minimum(first, num_run - forwards), num_run - forwards)
    changes = np.zeros((4, num_run + 1))
    for change, own in zip(changes, each * (forwards > 0), strict=True):
        change += np.bincount(first, own, num_run + 1)
        change -= np.bincount(first + forwards, own, num_run + 1)
    tokens: ForwardTokens = np.maximum(changes.cumsum(axis=1)[:, :-1], 0)
    if chunks:
        tokens[np.array([0, 2, 3]), :chunks] += prompt / chunks
    return tokens, chunks / max(num_run, 1)
