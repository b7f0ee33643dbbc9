"""Paces a long prompt beside sequences that decode, so that these wait at most twice as long.

A chunk of a few tokens is cheap where its products are the work. But each of its tokens attends to
everything before it: behind 16k tokens even a small chunk can take as long as tens of decode
forwards. So time is shared: after a forward with a chunk that took longer than two without, the
prompt pauses until the sequences that decode have had as many forwards of their own as it takes to
come back to two on average.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from wedlm_jax.engine.scheduling.replica import Replica
from wedlm_jax.engine.scheduling.sequence import SequenceState

SHARE = 2.0
"""How many times longer, on average, a forward may take for a long prompt beside it."""
PLAIN_FORWARDS = 8
"""Forwards of the first burst beside a long prompt, which has no chunk: it is the measure."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Says how prompts are computed in a burst.

    Attributes:
      tokens: of prompts that a forward may compute beside its windows; 0 pauses them.
      forwards: the most of the burst; None where chunks do not limit it.
    """

    tokens: int
    forwards: int | None = None


class PromptPace:
    """Chooses the chunks of each burst.

    Args:
      most: prompt tokens that a forward may compute where no long prompt is beside others.
      balanced: tokens of a forward that takes about twice as long as a forward of one token.
    """

    def __init__(self, most: int, balanced: int):
        self._most, self._balanced = most, balanced
        self._forget()

    def _forget(self) -> None:
        self._plain: float | None = None
        """Seconds of a forward without a chunk."""
        self._debt = 0.0
        """Seconds that forwards with chunks took beyond the share of all forwards so far."""
        self._is_dear = True
        """Whether the last forward with a chunk took more than its share."""
        self.is_paced = False
        """Whether a long prompt is computed beside sequences that decode."""

    def next_chunks(self, replicas: Sequence[Replica]) -> Chunks:
        """Returns the chunks of the next burst.

        That is the most, unless a longer prompt is computed while other sequences decode: then as
        many tokens as roughly double the time between theirs by their products, in turns with
        forwards without any, where attention makes them take longer.
        """
        budget = chunk_tokens(replicas, self._most, self._balanced)
        if budget is None:
            self._forget()
            return Chunks(self._most)
        self.is_paced = True
        if self._plain is None:
            return Chunks(0, PLAIN_FORWARDS)
        # A forward without a chunk takes one share less than it may.
        if (due := math.ceil(self._debt / ((SHARE - 1) * self._plain))) > 0:
            return Chunks(0, due)
        return Chunks(budget, 1 if self._is_dear else None)

    def observe(self, tokens: int, forwards: int, seconds: float) -> None:
        """Learns from a burst with chunks of so many tokens, and how many forwards it ran in how
        many seconds, the host's part included."""
        if not self.is_paced or not forwards:
            return
        if not tokens:
            self._plain = seconds / forwards
        if self._plain is None:
            return  # planned before there was a long prompt
        beyond = seconds - forwards * SHARE * self._plain
        if tokens:
            self._is_dear = beyond > 0
        # What is saved up while chunks are cheap must not be spent at once later: one forward's
        # worth is kept, since pauses are whole forwards.
        self._debt = max(self._debt + beyond, -(SHARE - 1) * self._plain)


def chunk_tokens(replicas: Sequence[Replica], most: int, balanced: int) -> int | None:
    """Returns how many prompt tokens a forward may compute beside its windows for its products to
    take at most about twice as long; None where no prompt of more than ``most`` tokens is computed
    while others decode.

    Args:
      balanced: tokens of a forward that takes about twice as long as a forward of one token.
    """
    budget = None
    for replica in replicas:
        prefilling = [one for one in replica.running if one.is_prefilling]
        # Not those at the end of their prompt, of which a paused one may lack the last token.
        others_decode = any(o.num_computed >= o.text_length_admitted for o in replica.running)
        if others_decode and any(_is_long(one, most) for one in prefilling):
            slots = sum(1 + one.window for one in replica.running)
            own = min(max(balanced - slots, slots), most)
            budget = own if budget is None else min(budget, own)
    return budget


def _is_long(sequence: SequenceState, most: int) -> bool:
    return sequence.text_length_admitted - max(sequence.num_cached_tokens, 0) > most
