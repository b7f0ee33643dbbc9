"""How long a burst is, and the pages that its sequences get for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import SequenceState

WAITING_FORWARDS = 32
"""Forwards of a burst while somebody waits for a place, at most; it also ends when one is free."""
PREFILL_FORWARDS = 8
"""The same while a long prompt is computed chunk by chunk."""
SHORT_OF_PAGES_FORWARDS = 8
"""The same while somebody waits for pages alone: none are given for later forwards then."""
WATCHED_FORWARDS = 16
"""The same while a sequence may be ended by its text, which only the host sees."""


@dataclasses.dataclass(frozen=True)
class BurstLength:
    """When a burst ends: after so many forwards, or when so many sequences have finished."""

    forwards: int
    until_finished: int


def burst_length(
    running: Sequence[SequenceState],
    *,
    longest: int,
    prefill_forwards: int,
    num_waiting: int,
    num_deferred: int,
    pages_are_short: bool,
) -> BurstLength:
    """Says when the next burst ends.

    Args:
      longest: forwards where nobody waits.
      prefill_forwards: those until all prompts are computed.
      num_waiting, num_deferred: sequences that wait, and how many of them for another's prompt.
      pages_are_short: whether some of them wait though an index is free.
    """
    forwards, until = longest, len(running)
    if any(sequence.request.params.stop for sequence in running):
        forwards = min(forwards, WATCHED_FORWARDS)
    if num_waiting:
        # A few may wait for each other, so that their successors are computed together.
        forwards, until = min(forwards, WAITING_FORWARDS), max(len(running) // 8, 1)
    if pages_are_short:
        forwards = min(forwards, SHORT_OF_PAGES_FORWARDS)
    if num_deferred:
        forwards = min(forwards, max(prefill_forwards, 1))
    if prefill_forwards > 1:
        forwards = min(forwards, PREFILL_FORWARDS)
    return BurstLength(forwards, until)


def chunk_tokens(replicas: Sequence[Replica], most: int, balanced: int) -> int:
    """Returns how many tokens of prompts a forward may compute beside its windows.

    That is ``most``, but for a prompt longer than that which is computed while others decode: then
    as many as about double the time between their tokens. (Where the model is small and the prompt
    so long that attention to it is most of the work, even these take longer.)

    Args:
      balanced: tokens of a forward that takes about twice as long as that of one token.
    """
    budget = most
    for replica in replicas:
        prefilling = [one for one in replica.running if one.is_prefilling]
        others_decode = len(prefilling) < len(replica.running)
        if others_decode and any(_is_long(one, most) for one in prefilling):
            slots = sum(1 + one.window for one in replica.running)
            budget = min(budget, max(balanced - slots, slots))
    return budget


def _is_long(sequence: SequenceState, most: int) -> bool:
    return sequence.text_length_admitted - max(sequence.num_cached_tokens, 0) > most


def prefill_forwards(replica: Replica, chunk_tokens: int) -> int:
    """Forwards until the prompts of a replica are computed."""
    left = sum(
        sequence.text_length_admitted - sequence.num_computed
        for sequence in replica.running
        if sequence.is_prefilling
    )
    return -(-left // chunk_tokens)


def give_pages(replica: Replica, forwards: int) -> int:
    """Gives every sequence pages for the forwards of a burst, or for fewer where there are not
    enough for all. For the next forward there must be enough.

    Returns:
      for how many forwards they will probably last.
    """
    sequences = [
        (sequence, sequence.room_needed, expected_rate(sequence), sequence.longest_room)
        for sequence in replica.running
    ]
    while True:
        rooms = [
            (one, max(room, min(room + math.ceil(rate * (forwards - 1)), longest)))
            for one, room, rate, longest in sequences
        ]
        lacking = sum(replica.lacks(one, room) for one, room in rooms)
        if forwards == 1 or lacking <= replica.num_available:
            break
        forwards //= 2
        for one, room, rate, _ in sequences:
            replica.trim(one, room + math.ceil(rate * (forwards - 1)))
    for one, room in rooms:
        replica.grow(one, room)
    return forwards


def expected_rate(sequence: SequenceState) -> float:
    """Tokens that a forward will probably commit, on the generous side."""
    window = sequence.window
    if window == 0:
        return 1.0
    if sequence.num_forwards < 4:
        return 1 + window / 4
    return 1.25 * sequence.num_output / sequence.num_forwards
