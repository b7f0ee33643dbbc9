"""How many tokens a forward of a window commits: what was seen of a sequence, and of all others.

A sequence is of one of a few *types*, easy to hard. With a window of W, a forward of type m
commits

    E_m(W) = Σ S_m(k), k = 0 .. W - 1,    S_m(k) = q_m ** (k ** SHAPE),

S being how probable a run is to go on behind its k-th token. One number a type tells all widths,
so what a window of 16 has committed says what one of 4 would. SHAPE is such that the family holds
on the embedded model's texts, easy and hard, in both modes, within 3 % for most widths. What the
family misses of a width is learnt beside it.
"""

from __future__ import annotations

import numpy as np

Floats = np.ndarray
"""float64."""

SHAPE = 1.2
NUM_TYPES = 16
MOST_TOKENS = 40.0
"""Tokens a forward of the easiest type, with a window without end."""
BASE_WEIGHT = 2.0
"""Sequences that all types together count for before any is seen."""
MEMORY = 40.0
"""Sequences that the population remembers, at most; older ones fade."""
FADING = 0.995
"""What is left of the population's evidence from one burst to the next."""
WHOLE_SEQUENCE, MOST_AT_ONCE = 48.0, 2.0
"""Tokens of a sequence that count as one for the population, and as how many those of one look
count at most. Tokens, not forwards: hard sequences take more of these."""
OWN_MEMORY = 48.0
"""Forwards of a sequence that its own evidence remembers."""
INFLATION = 1.5
"""Runs of a sequence are not independent: easy and hard places come in clusters."""
MISFIT = 0.08
"""Standard deviation of what the family misses of a width, before it is known."""
TEXT_CHANGES = 0.08
"""Standard deviation of how much easier the text of a burst is than that of the one before."""
UNSETTLED = 0.2
"""How wrong the first forward of a new width makes what a try of a single forward says; longer
tries are less so."""
MISFIT_DRIFT = 0.002
"""How much of it comes anew with each try."""
MOST_SURPRISE = 0.5
OPTIMISM = 0.85
"""Share of the population that is harder than the type that is hoped for."""


class Family:
    """The types, for the widths that may be chosen.

    Attributes:
      expected: ``[M, K]``, tokens a forward of each type commits with each width.
      variance: ``[M, K]``, of the tokens of a forward.
    """

    def __init__(self, widths: np.ndarray):
        limits = np.geomspace(1.1, MOST_TOKENS, NUM_TYPES)
        places = np.arange(512.0) ** SHAPE
        q = np.array([_continuing(limit, places) for limit in limits])
        survival = q[:, None] ** places[: max(int(widths.max()), 1)]
        columns = np.maximum(widths, 1) - 1
        self.expected = np.cumsum(survival, axis=1)[:, columns]
        odd = 2 * np.arange(survival.shape[1]) + 1
        square = np.cumsum(survival * odd, axis=1)[:, columns]
        self.variance = INFLATION * (square - self.expected**2) + 0.05


def _continuing(limit: float, places: np.ndarray) -> float:
    """The q whose runs are ``limit`` long on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        q = (low + high) / 2
        low, high = (q, high) if (q**places).sum() < limit else (low, q)
    return low


class Acceptance:
    """What is known of the sequences of one kind, such as those of mode "verified".

    Their own evidence is an array ``[n, M]`` of log-likelihoods that the caller keeps, a row a
    sequence; zeros where nothing was seen.

    Args:
      widths: int ``[K]``, those that may be chosen, 0 among them, ascending.
    """

    def __init__(self, widths: np.ndarray):
        self._widths = widths
        self._family = Family(widths)
        self._base = np.full(NUM_TYPES, 1 / NUM_TYPES)
        self._seen = np.zeros(NUM_TYPES)
        self._misfit = np.zeros(len(widths))
        self._misfit_variance = np.full(len(widths), MISFIT**2)
        self._misfit_variance[0] = 0
        self._used = np.zeros(len(widths))
        self._filled = 1 + widths / 64
        self._update()

    def _update(self) -> None:
        counts = self._seen + BASE_WEIGHT * self._base
        self._population: Floats = counts / counts.sum()
        self._log_population: Floats = np.log(self._population)
        self._expected: Floats = self._family.expected * np.exp(self._misfit)
        self._expected[:, 0] = 1
        self._forwards: Floats = 1 / self._expected

    @property
    def filled_slots(self) -> Floats:
        """``[K]``: filled slots of a window beside each token that it commits a forward."""
        return self._filled

    def types(self, own: Floats) -> Floats:
        """``[n, M]``: how probable it is that each sequence is of each type."""
        scores = own + self._log_population
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        types: Floats = scores / scores.sum(axis=1, keepdims=True)
        return types

    def expected(self, own: Floats) -> Floats:
        """``[n, K]``: tokens that a forward of each sequence commits, for each width.

        That is the inverse of the forwards that a token is expected to take: a sequence has so many
        tokens to commit, and if it turns out to be hard it takes the longer.
        """
        tokens: Floats = 1 / (self.types(own) @ self._forwards)
        return tokens

    def expected_of_new(self) -> Floats:
        """``[1, K]``: the same of a sequence of which nothing is known."""
        tokens: Floats = 1 / (self._population @ self._forwards)
        return tokens[None]

    def hoped(self) -> Floats:
        """``[K]``: tokens a forward of the next sequence, if what is not known is in our favour:
        the less was seen of late, the more of the population's easy types; and of each width, what
        the family may miss."""
        index = int(np.searchsorted(np.cumsum(self._population), OPTIMISM))
        usual = self.expected_of_new()[0]
        unknown = BASE_WEIGHT / (BASE_WEIGHT + self._seen.sum())
        easy = self._expected[min(index, NUM_TYPES - 1)]
        hoped: Floats = usual + unknown * np.maximum(easy - usual, 0)
        hoped *= np.exp(np.sqrt(self._misfit_variance))
        return np.minimum(hoped, np.maximum(self._widths, 1))

    def fade(self) -> None:
        """Lets a burst pass: texts change."""
        self._seen *= FADING
        self._used *= FADING

    def learn(
        self,
        own: Floats,
        columns: np.ndarray,
        tokens: Floats,
        forwards: Floats,
        slots: Floats,
        tried: np.ndarray,
    ) -> None:
        """Learns from a burst, and updates what is known of each sequence in place.

        Args:
          own: ``[n, M]``.
          columns: int ``[n]``, which of the widths each had, not 0.
          tokens, forwards, slots: ``[n]``, what it committed, in how many forwards, at least 1,
            with how many active slots.
          tried: bool ``[n]``, whether it had its width only to learn of it.
        """
        before = self.types(own)
        rate = tokens / forwards
        expected = self._expected.T[columns]
        variance = self._family.variance.T[columns] / forwards[:, None]
        if tried.any():
            self._learn_misfit(before, columns, rate, expected, variance, tried, forwards)
        self._used += np.bincount(columns, forwards, minlength=len(self._used))
        self._learn_filled(columns, tokens, forwards, slots)
        own *= np.exp(-forwards / OWN_MEMORY)[:, None]
        own -= 0.5 * ((rate[:, None] - expected) ** 2 / variance + np.log(variance))
        own -= own.max(axis=1, keepdims=True)
        weight = np.minimum(tokens / WHOLE_SEQUENCE, MOST_AT_ONCE)
        self._seen += weight @ self.types(own)
        total = self._seen.sum()
        if total > MEMORY:
            self._seen *= MEMORY / total
        self._update()

    def _learn_misfit(
        self,
        types: Floats,
        columns: np.ndarray,
        rate: Floats,
        expected: Floats,
        variance: Floats,
        tried: np.ndarray,
        forwards: Floats,
    ) -> None:
        """Compares widths that were tried with the usual one. That one is what the types are learnt
        from, so it has no misfit of its own; and where it commits more than expected in this burst,
        the text is easier, which is no merit of the others.

        Sequences that have other widths because of what is known of them would teach how wrong
        that is, not what the family misses.
        """
        count = len(self._widths)
        usual = int(self._used.argmax())
        mean = (types * expected).sum(axis=1)
        spread = (types * (expected**2 + variance)).sum(axis=1) - mean**2
        precision = mean**2 / spread
        others = precision * ((columns == usual) & ~tried)
        excess = precision * (rate / mean - 1)
        if others.any():
            common = float((others > 0) @ excess / others.sum())
            doubt = np.full(count, 1 / others.sum())
        else:  # all are alike in what is not known of the population, and of this moment's text
            unknown = BASE_WEIGHT / (BASE_WEIGHT + self._seen.sum())
            square = self._population @ self._expected**2
            ratio = square / (self._population @ self._expected) ** 2
            common, doubt = 0.0, unknown * (ratio - 1) + TEXT_CHANGES**2
        doubt += (UNSETTLED / forwards[tried].mean()) ** 2
        weight = np.bincount(columns, precision * tried, minlength=count)
        surprise = np.bincount(columns, excess * tried, minlength=count)
        for j in np.flatnonzero(weight):
            if j == usual:
                continue
            variance_now = self._misfit_variance[j]
            gain = variance_now / (variance_now + 1 / weight[j] + doubt[j])
            found = float(np.clip(surprise[j] / weight[j] - common, -MOST_SURPRISE, MOST_SURPRISE))
            self._misfit[j] += gain * found
            self._misfit_variance[j] = variance_now * (1 - gain) + MISFIT_DRIFT**2

    def _learn_filled(
        self, columns: np.ndarray, tokens: Floats, forwards: Floats, slots: Floats
    ) -> None:
        count = len(self._widths)
        committed = np.bincount(columns, tokens, minlength=count)
        filled = np.bincount(columns, slots - forwards * self._widths[columns], minlength=count)
        seen = np.flatnonzero(committed > 0)
        gain = committed[seen] / (committed[seen] + 200)
        ratio = np.clip(filled[seen] / committed[seen], 0.5, 4)
        self._filled[seen] += gain * (ratio - self._filled[seen])
