"""Counts of the tokens in the data that ordinary text is not made of."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

import numpy as np
from tokenizers import Tokenizer


class AddedTokens:
    """Counts the tokens that ordinary text is not made of: those added to a tokenizer, and ids that
    it does not have."""

    def __init__(self, tokenizer: Tokenizer):
        ordinary = set(tokenizer.get_vocab(with_added_tokens=True).values())
        ordinary -= set(tokenizer.get_added_tokens_decoder())
        self._ordinary = np.zeros(max(ordinary, default=0) + 2, bool)  # the last: ids beyond
        self._ordinary[list(ordinary)] = True
        self._counts: collections.Counter[int] = collections.Counter()

    def count(self, tokens: np.ndarray) -> None:
        """Takes in the tokens ``[L]`` of a sample."""
        ordinary = self._ordinary[np.minimum(tokens, len(self._ordinary) - 1)]
        self._counts.update(tokens[~ordinary].tolist())

    def by_id(self) -> dict[str, int]:
        """Returns the counts, the smallest id first."""
        return {str(token): count for token, count in sorted(self._counts.items())}


def added_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums of counts by id, the smallest id first."""
    total: collections.Counter[str] = collections.Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items(), key=lambda item: int(item[0])))
