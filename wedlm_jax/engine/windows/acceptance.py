"""Predicts how many tokens a forward of a window commits, from the sequence and others like it.

A sequence is of one of a few *types*, easy to hard. With a window of W, a forward of type m
commits

    E_m(W) = Σ S_m(k), k = 0 .. W - 1,    S_m(k) = q_m ** (k ** SHAPE),

where S_m(k) is the probability that a run continues after its k-th token. One number per type
predicts all widths, so what a window of 16 has committed tells what one of 4 would. With this SHAPE
the family fits the embedded model's texts, easy and hard, in both modes, within 3 % for most
widths.
"""

from __future__ import annotations

import numpy as np

Floats = np.ndarray
"""float64."""

SHAPE = 1.2
NUM_TYPES = 16
MOST_TOKENS = 40.0
"""Tokens that a forward of the easiest type commits, with an unlimited window."""
HOPE = 0.5
"""Prior weight, in sequences, of the easiest types; the population returns to it while nothing is
observed. So windows are tried before they are given up, and again later."""
MEMORY = 40.0
"""The most sequences that the population remembers."""
FADING = 0.99
"""The share of that memory that is kept from one burst to the next: texts change."""
WHOLE_SEQUENCE, MOST_AT_ONCE = 48.0, 2.0
"""Tokens of a sequence that count as one sequence for the population, and the most that one burst
counts. Tokens, not forwards: hard sequences take more of these."""
OWN_MEMORY = 48.0
"""Forwards after which a sequence's own evidence has decayed."""
INFLATION = 1.5
"""Widens the variance: runs of a sequence are not independent, hard places come in clusters."""


class Acceptance:
    """Learns how the sequences of one kind, such as those of mode "verified", commit.

    The evidence of each sequence is an array ``[n, M]`` of log-likelihoods that the caller keeps,
    zeros before anything is observed.

    Args:
      widths: int ``[K]``, the windows that may be chosen, 0 first, ascending.

    Attributes:
      expected_by_type: ``[M, K]``, tokens that a forward of each type commits with each width.
    """

    def __init__(self, widths: np.ndarray):
        self._widths = widths
        limits = np.geomspace(1.1, MOST_TOKENS, NUM_TYPES)
        places = np.arange(512.0) ** SHAPE
        q = np.array([_continuing(limit, places) for limit in limits])
        survival = q[:, None] ** places[: max(int(widths.max()), 1)]
        columns = np.maximum(widths, 1) - 1
        self.expected_by_type: Floats = np.cumsum(survival, axis=1)[:, columns]
        square = np.cumsum(survival * (2 * np.arange(survival.shape[1]) + 1), axis=1)[:, columns]
        self._variance = INFLATION * (square - self.expected_by_type**2) + 0.05
        self._filled, self._wasted = 1.0, 1 + widths / 64
        self._hope = np.zeros(NUM_TYPES)
        self._hope[-NUM_TYPES // 4 :] = HOPE / (NUM_TYPES // 4)
        self._seen = np.zeros(NUM_TYPES)

    def expected(self, own: Floats) -> Floats:
        """Returns the tokens that a forward of each sequence commits with each width, ``[n, K]``.

        A harmonic mean over types, the inverse of the expected forwards per token: a sequence has a
        fixed number of tokens to commit, and spends more forwards if it turns out to be hard.
        """
        tokens: Floats = 1 / (self._types(own) @ (1 / self.expected_by_type))
        return tokens

    def filled(self, committed: Floats) -> Floats:
        """Returns the filled slots of windows that commit so many tokens a forward, ``[n, K]``: the
        wider a window, the more of its drafts turn out to be wrong."""
        filled: Floats = np.minimum(self._filled * self._wasted * committed, self._widths)
        return filled

    def fade(self) -> None:
        """Forgets a little, once a burst."""
        self._seen *= FADING

    def learn(
        self, own: Floats, columns: np.ndarray, tokens: Floats, forwards: Floats, slots: Floats
    ) -> None:
        """Learns from a burst, and updates the evidence of each sequence in place.

        Args:
          own: ``[n, M]``, their evidence.
          columns: int ``[n]``, the column of the width that each had, not 0.
          tokens, forwards, slots: ``[n]``, tokens committed, forwards (at least 1), active slots.
        """
        expected = self.expected_by_type.T[columns]
        variance = self._variance.T[columns] / forwards[:, None]
        own *= np.exp(-forwards / OWN_MEMORY)[:, None]
        own -= 0.5 * (((tokens / forwards)[:, None] - expected) ** 2 / variance + np.log(variance))
        own -= own.max(axis=1, keepdims=True)
        self._seen += np.minimum(tokens / WHOLE_SEQUENCE, MOST_AT_ONCE) @ self._types(own)
        self._seen *= MEMORY / max(self._seen.sum(), MEMORY)
        filled = slots.sum() - forwards @ self._widths[columns]
        ratio = np.clip(filled / max(tokens @ self._wasted[columns], 1), 0.5, 4)
        self._filled += tokens.sum() / (tokens.sum() + 200) * (ratio - self._filled)

    def _types(self, own: Floats) -> Floats:
        """Returns the probability that each sequence is of each type, ``[n, M]``."""
        scores = own + np.log(self._seen + self._hope + 1e-3)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        types: Floats = scores / scores.sum(axis=1, keepdims=True)
        return types


def _continuing(limit: float, places: np.ndarray) -> float:
    """Returns the q whose runs are ``limit`` tokens long on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        q = (low + high) / 2
        low, high = (q, high) if (q**places).sum() < limit else (low, q)
    return low
