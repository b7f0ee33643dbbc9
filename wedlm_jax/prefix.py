"""Beginnings that prompts share: which row's cache already holds the first tokens of another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

SHORTEST_PREFIX = 32
"""Tokens below which computing them again is as cheap as copying them."""


class PrefixIndex:
    """The prompt tokens that each row's cache holds, whether the row is decoding or done.

    Args:
      rows: of the batch.
    """

    def __init__(self, rows: int):
        self._held: list[np.ndarray] = [np.zeros(0, np.int32) for _ in range(rows)]

    def hold(self, row: int, tokens: Sequence[int] | np.ndarray) -> None:
        """From now on the row's cache begins with these."""
        self._held[row] = np.asarray(tokens, np.int32)

    def longest(self, prompt: np.ndarray, rows: Iterable[int]) -> tuple[int, int]:
        """The row among ``rows`` from which the most first tokens of ``prompt`` can be taken over,
        and how many; (-1, 0) where none holds `SHORTEST_PREFIX`.

        All of them only from a row with the same prompt: another does not know what follows the
        last of them.
        """
        best, most = -1, SHORTEST_PREFIX - 1
        for row in rows:
            held = self._held[row]
            if len(held) > most and (common := shared(prompt, held)) > most:
                common -= common == len(prompt) < len(held)
                best, most = (row, common) if common > most else (best, most)
        return (best, most) if best >= 0 else (-1, 0)


def shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many first tokens are the same."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
