"""Follows the sequences of a device through their grammars, and what it asks of their library.

Tested by tests/wedlm_jax/engine/test_grammars.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from wedlm_jax.decode.options import all_allowed
from wedlm_jax.errors import InputError, shortened
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


class GrammarMasks:
    """The matchers of the sequences that decode under a grammar, and what they allow.

    Args:
      grammars: None where no sequence has one.
      sequences: N.
      vocab: V.
    """

    def __init__(self, grammars: Grammars | None, sequences: int, vocab: int):
        self._grammars, self._sequences, self._vocab = grammars, sequences, vocab
        self._matchers: dict[int, tuple[Matcher, SamplingParams]] = {}
        self._masks = all_allowed(sequences, 1, vocab)

    def enter(self, index: int, params: SamplingParams, completion: Sequence[int]) -> None:
        """Begins to follow the sequence at ``index``, which has this completion already."""
        self.leave(index)
        if params.grammar is not None:
            assert self._grammars is not None, "the engine refuses grammars that it cannot follow"
            matcher = self._grammars.matcher(params)
            matcher.consume_tokens(list(completion))
            self._matchers[index] = matcher, params

    def clear(self) -> None:
        """Stops following all sequences."""
        for index in list(self._matchers):
            self.leave(index)

    def leave(self, index: int) -> None:
        """Stops following the sequence at ``index``."""
        if self._matchers.pop(index, None) is not None:
            self._masks[index] = ~np.uint32(0)

    def allowed(self, rows: int, drafts: Callable[[], list[list[int]]]) -> np.ndarray:
        """Returns the masks of the next forward, as `wedlm_jax.decode.options` has them.

        Args:
          rows: R of the program.
          drafts: returns those in the window of each sequence, in order.
        """
        if self._masks.shape[1] != rows:
            self._masks = all_allowed(self._sequences, rows, self._vocab)
        if self._matchers:
            assert self._grammars is not None
            # One row checks no drafts, so the device need not be asked for any.
            there = drafts() if rows > 1 else [[]] * self._sequences
            places = [
                (matcher, index * rows, there[index][: rows - 1])
                for index, (matcher, _) in self._matchers.items()
            ]
            self._grammars.fill(places, self._masks.reshape(-1, self._masks.shape[2]))
        return self._masks

    def commit(self, index: int, tokens: Sequence[int], *, stopped: bool) -> InputError | None:
        """Takes in what a sequence has committed. The matcher has the last word: it also finds
        where no token at all was allowed, which nothing on the device can know.

        Args:
          stopped: whether the last token ends the completion.

        Returns:
          why the sequence cannot go on; None if it can, or has no grammar.
        """
        if index not in self._matchers:
            return None
        matcher, params = self._matchers[index]
        text = list(tokens[:-1] if stopped else tokens)
        if matcher.consume_tokens(text) and (not stopped or _may_end(matcher, tokens[-1], params)):
            return None
        assert params.grammar is not None
        reason = shortened(matcher.get_error().partition("\n")[0] or "no token continues it")
        self.leave(index)
        return InputError(
            f"{params.grammar[0]}: the completion cannot be continued within it ({reason})"
        )


def _may_end(matcher: Matcher, token: int, params: SamplingParams) -> bool:
    """Returns whether a completion may end with a token: where its text is whole, or where the
    token is one of ``stop_token_ids`` that the grammar allows there."""
    if matcher.is_accepting():
        return True
    return token in params.stop_token_ids and matcher.consume_tokens([token])
