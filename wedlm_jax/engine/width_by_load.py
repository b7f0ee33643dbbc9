"""The windows of sequences that decode together, by what each promises and what all cost."""

from __future__ import annotations

import numpy as np

from wedlm_jax.engine.cost import CostTable, ForwardTokens

Floats = np.ndarray
"""float64."""
Columns = np.ndarray
"""int ``[n]``: which of the K widths each sequence has."""

STAY = 1.015
"""Another window must promise so much more than the one a sequence has: changing it costs a
forward without drafts."""
PRICES = np.concatenate([[0.0], np.geomspace(0.004, 1.0, 19)])
"""Tokens committed that a token computed must at least bring."""
TOKENS_DOUBT = 0.05
"""How far off the expected tokens of a forward may be, as a share of them: what just fits into a
size may as well not fit."""
WORTH_A_TRY = 1.01
"""A window is tried where this much of the present speed can be hoped for."""
LITTLE = 0.1
"""Share of the speed that a try of all sequences together may be expected to lose."""


def window_tokens(widths: np.ndarray, filled: Floats) -> ForwardTokens:
    """``[4, ..]``: tokens of a forward of a sequence, whose window holds so many ``filled`` slots
    on average beside its masks; 1 where the width is 0."""
    wide = widths > 0
    drafts = np.clip(filled - 1, 0, np.maximum(widths - 1, 0))
    variance = np.minimum((0.85 * drafts + 0.3) ** 2, drafts * (widths - 1 - drafts))
    return np.stack(
        np.broadcast_arrays(
            widths + np.where(wide, 1 + drafts, 1),
            np.where(wide, variance, 0),
            widths + 1,
            np.where(wide, 2 * widths, 1),
        )
    ).astype(np.float64)


class Load:
    """What sequences do with each width.

    Attributes:
      committed: ``[n, K]``, tokens that a forward commits.
      tokens: ``[4, n, K]``, tokens that it computes.

    Args:
      filled: ``[n, K]``, filled slots for each token that is committed.
    """

    def __init__(self, committed: Floats, widths: np.ndarray, filled: Floats):
        self.tokens = window_tokens(widths, filled * committed)
        committed[:, 0] = 1
        self.committed = committed

    def together(self) -> tuple[Floats, ForwardTokens]:
        """``[K]`` and ``[4, K]``: committed and computed where all have the same width."""
        return self.committed.sum(axis=0), self.tokens.sum(axis=1)


class WidthsByLoad:
    """The widths of n sequences with the most tokens a second.

    Args:
      load: as it is expected.
      hoped: ``[n, K]``, tokens that a forward may commit if what is not known is favourable.
      base_committed, base_tokens: ``[4]``, of a forward, by sequences whose windows are fixed.
      costs: seconds of a forward.
    """

    def __init__(
        self,
        load: Load,
        hoped: Load,
        *,
        base_committed: float,
        base_tokens: ForwardTokens,
        costs: CostTable,
    ):
        self._load, self._hoped, self._costs = load, hoped, costs
        self._base_committed, self._base_tokens = base_committed, base_tokens
        self._count, self._num_widths = load.committed.shape

    def _rate(self, committed: Floats, tokens: ForwardTokens) -> Floats:
        tokens = tokens + self._base_tokens.reshape(4, *[1] * (tokens.ndim - 1))
        tokens[1] += (TOKENS_DOUBT * tokens[0]) ** 2
        rate: Floats = (self._base_committed + committed) / self._costs.expected(tokens)
        return rate

    def best(self, now: Columns) -> tuple[Columns, float | None]:
        """Returns the columns with the most tokens a second, and the price of a computed token
        that leads to them; None where all have the same.

        Args:
          now: what each sequence has; −1 for one that begins.
        """
        load, preferred = self._load, self._load.committed
        staying = np.flatnonzero(now >= 0)
        if len(staying):
            preferred = preferred.copy()
            preferred[staying, now[staying]] *= STAY
        if self._count == 1:
            rates = self._rate(preferred[0], load.tokens[:, 0])
            return np.array([rates.argmax()]), None
        picks = self._candidates(preferred)
        flat = picks + np.arange(self._count) * self._num_widths
        committed = preferred.ravel()[flat].sum(axis=1)
        tokens = load.tokens.reshape(4, -1)[:, flat].sum(axis=2)
        found = int(self._rate(committed, tokens).argmax())
        columns: Columns = picks[found]
        return columns, float(PRICES[found]) if found < len(PRICES) else None

    def usual(self, unknown: Load, columns: Columns, price: float | None) -> int:
        """Returns the column of a sequence of which nothing is known, beside those that have
        ``columns``.

        Args:
          unknown: its load, ``[1, K]``.
          price: as `best` has returned it.
        """
        if price is not None:
            return int((unknown.committed[0] - price * unknown.tokens[0, 0]).argmax())
        if self._count > 1:
            return int(columns[0])
        return int(self._rate(unknown.committed[0], unknown.tokens[:, 0]).argmax())

    def _candidates(self, committed: Floats) -> np.ndarray:
        """int ``[C, n]``: for each price of a computed token what pays for every sequence, and the
        same width for all. Where cost is linear in tokens one of these is best; sizes of forwards
        make it a little less than that."""
        tokens = self._load.tokens[0]
        # Width by width: a maximum over a long axis is many times faster than over a short one.
        best = committed[:, 0] - PRICES[:, None] * tokens[:, 0]
        picks = np.zeros(best.shape, np.int64)
        for column in range(1, self._num_widths):
            gain = committed[:, column] - PRICES[:, None] * tokens[:, column]
            better = gain > best
            best = np.where(better, gain, best)
            picks[better] = column
        alike = np.repeat(np.arange(self._num_widths)[:, None], self._count, axis=1)
        return np.concatenate([picks, alike])

    def attempt(self, columns: Columns, candidate: int) -> tuple[Columns, float] | None:
        """Returns columns to learn from, and the share of the speed that is expected to be lost
        on them; None where nothing better can be hoped for.

        All get the same other width where that is likely to cost little: it teaches what forwards
        of that size cost, too. Else one sequence gets one.

        Args:
          columns: the best.
          candidate: the sequence that may be tried, such as the one of which least is known.
        """
        every, load, hoped = np.arange(self._count), self._load, self._hoped
        committed = load.committed[every, columns].sum()
        tokens = load.tokens[:, every, columns].sum(axis=1)
        rate = float(self._rate(committed, tokens))
        together = self._rate(*load.together())
        all_hoped = self._rate(*hoped.together())
        favour = np.exp(self._costs.doubt(load.tokens[0].sum(axis=0), float(tokens[0])))
        promise = all_hoped * favour
        alike = bool((columns == columns[0]).all())
        little = together >= (1 - LITTLE) * rate
        promise_of_all = np.where(little | (self._count == 1), promise, 0)
        if alike:
            promise_of_all[columns[0]] = 0
        column = int(promise_of_all.argmax())
        if promise_of_all[column] > WORTH_A_TRY * rate:
            return np.full_like(columns, column), _loss(together[column], rate)
        if self._count == 1:
            return None
        own = columns[candidate]
        committed = committed - load.committed[candidate, own]
        tokens = (tokens - load.tokens[:, candidate, own])[:, None]
        hope = self._rate(
            committed + hoped.committed[candidate], tokens + hoped.tokens[:, candidate]
        )
        # What does not pay for one alone may pay for all together.
        promise = np.maximum(hope, all_hoped)
        promise[own] = 0
        column = int(promise.argmax())
        if promise[column] < WORTH_A_TRY * rate:
            return None
        one = self._rate(
            committed + load.committed[candidate, column],
            tokens[:, 0] + load.tokens[:, candidate, column],
        )
        tried = columns.copy()
        tried[candidate] = column
        return tried, _loss(float(one), rate)


def _loss(rate: float, best: float) -> float:
    return max(1 - float(rate) / best, 0.0)
