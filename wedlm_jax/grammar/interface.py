"""What an engine asks of a library of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from wedlm_jax.params import SamplingParams


class Matcher(Protocol):
    """The place in its grammar that one completion has reached."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Moves on by these tokens; returns False where the grammar does not allow one of them, or
        has grown beyond its limits. The matcher is of no use then."""

    def is_accepting(self) -> bool:
        """Returns whether the completion may end here."""

    def get_error(self) -> str:
        """Returns why the matcher is of no use; empty if it is."""


class Grammars(Protocol):
    """Makes the matchers of completions."""

    def check(self, params: SamplingParams) -> None:
        """Refuses a grammar that cannot be followed.

        Raises:
          InputError: naming the field, and why.
        """

    def matcher(self, params: SamplingParams) -> Matcher:
        """Returns the matcher of a completion that has no tokens yet."""

    def fill(self, places: Sequence[tuple[Matcher, int, list[int]]], masks: np.ndarray) -> None:
        """Writes the tokens that are allowed at some places.

        Args:
          places: matchers, each with a row of ``masks`` and the drafts after it. The next rows are
            for the places after each of the drafts, up to the first that is not allowed.
          masks: uint32 ``[rows, words]``; token t is bit ``t % 32`` of word ``t // 32``. The end of
            the text is a token like others, allowed where the matcher accepts.
        """
