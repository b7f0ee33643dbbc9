"""Follows sequences through their grammars, and says what a grammar library must provide.

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
    """How far one completion has advanced through its grammar."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        """Advances by these tokens. Returns False if the grammar does not allow one of them, or has
        grown beyond its limits; the matcher is then unusable."""

    def is_accepting(self) -> bool:
        """Returns whether the completion may end here."""

    def get_error(self) -> str:
        """Returns why the matcher is unusable; an empty string if it is usable."""


class Grammars(Protocol):
    """Makes the matchers of completions."""

    def check(self, params: SamplingParams) -> None:
        """Refuses a grammar that cannot be followed.

        Raises:
          InputError: the message names the field and the reason.
        """

    def matcher(self, params: SamplingParams) -> Matcher:
        """Returns the matcher of a completion that has no tokens yet."""

    def fill(self, places: Sequence[tuple[Matcher, int, list[int]]], masks: np.ndarray) -> None:
        """Writes which tokens are allowed at some places.

        Args:
          places: matchers, each with a row of ``masks`` and the drafts after it. The next rows are
            for the places after each of the drafts, up to the first that is not allowed.
          masks: uint32 ``[rows, words]``; token t is bit ``t % 32`` of word ``t // 32``. The end of
            the text is a token like others, allowed where the matcher accepts.
        """


class GrammarMasks:
    """The matchers of the sequences that decode under a grammar, and what they allow.

    Args:
      grammars: makes the matchers; None if no sequence has a grammar.
      sequences: N.
      vocab: V.
    """

    def __init__(self, grammars: Grammars | None, sequences: int, vocab: int):
        self._grammars, self._sequences, self._vocab = grammars, sequences, vocab
        self._matchers: dict[int, tuple[Matcher, SamplingParams]] = {}
        self._masks = all_allowed(sequences, 1, vocab)

    def enter(self, index: int, params: SamplingParams, completion: Sequence[int]) -> None:
        """Starts following the sequence at ``index``, whose completion so far is ``completion``."""
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
        """Returns the masks of the next forward, in the format of
        `wedlm_jax.decode.options.all_allowed`.

        Args:
          rows: R of the program.
          drafts: returns the drafts in the window of each sequence, in order.
        """
        if self._masks.shape[1] != rows:
            self._masks = all_allowed(self._sequences, rows, self._vocab)
        if self._matchers:
            assert self._grammars is not None
            # One row checks no drafts, so the device need not be asked for any.
            drafted = drafts() if rows > 1 else [[]] * self._sequences
            places = [
                (matcher, index * rows, drafted[index][: rows - 1])
                for index, (matcher, _) in self._matchers.items()
            ]
            self._grammars.fill(places, self._masks.reshape(-1, self._masks.shape[2]))
        return self._masks

    def commit(self, index: int, tokens: Sequence[int], *, stopped: bool) -> InputError | None:
        """Advances a sequence's matcher by the tokens it has committed. The matcher decides: it
        also notices if no token at all was allowed, which the device cannot know.

        Args:
          stopped: whether the last token ends the completion.

        Returns:
          why the sequence cannot continue; None if it can, or has no grammar.
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
            f"{params.grammar[0]}: the completion cannot continue within the grammar ({reason})"
        )


def _may_end(matcher: Matcher, token: int, params: SamplingParams) -> bool:
    """Returns whether a completion may end with a token: if its text is complete, or if the token
    is one of ``stop_token_ids`` that the grammar allows there."""
    if matcher.is_accepting():
        return True
    return token in params.stop_token_ids and matcher.consume_tokens([token])
