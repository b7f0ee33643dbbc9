"""Plans a burst: how many forwards it runs, and the pages that its sequences get for them.

A long burst saves round trips to the host; a short one lets waiting requests in, and notices stop
strings, earlier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from wedlm_jax.engine.scheduling.prompt_pace import Chunks
from wedlm_jax.engine.scheduling.replica import Replica
from wedlm_jax.engine.scheduling.sequence import SequenceState

WAITING_FORWARDS = 32
"""The most forwards of a burst while a sequence waits for a place; it also ends when one is
free."""
PREFILL_FORWARDS = 8
"""The same while a long prompt is computed chunk by chunk."""
SHORT_OF_PAGES_FORWARDS = 8
"""The same while a sequence waits for pages only: no pages are given for later forwards then."""
WATCHED_FORWARDS = 16
"""The same while a stop string, which only the host sees, may end a sequence."""


@dataclasses.dataclass(frozen=True)
class BurstLength:
    """The end of a burst: after so many forwards of each replica, or when so many sequences of each
    have finished, by the number of the replica."""

    forwards: int
    until_finished: list[int]


def burst_length(
    running: Sequence[Sequence[SequenceState]],
    *,
    longest: int,
    prefill_forwards: int,
    chunks: Chunks,
    num_waiting: int,
    num_deferred: int,
    pages_are_short: bool,
    soon: bool = False,
) -> BurstLength:
    """Decides when the next burst ends.

    Args:
      running: sequences of each replica.
      longest: forwards if no sequence waits.
      prefill_forwards: forwards until all prompts are computed; 0 if they are paused.
      chunks: of the burst.
      num_waiting, num_deferred: sequences that wait, and how many of them for another's prompt.
      pages_are_short: whether some of them wait although an index is free.
      soon: whether callers want to hear of finished sequences soon, and may have others.
    """
    everybody = [sequence for some in running for sequence in some]
    forwards, until = longest, [len(some) for some in running]
    if any(sequence.request.params.stop for sequence in everybody):
        forwards = min(forwards, WATCHED_FORWARDS)
    if any(sequence.request.params.grammar for sequence in everybody):
        forwards = 1  # what a grammar allows, the host says from forward to forward
    if num_waiting or soon:
        # So many sequences finish before new ones enter, whose prompts then share forwards.
        until = [max(count // (4 if soon else 8), 1) for count in until]
    if num_waiting:
        forwards = min(forwards, WAITING_FORWARDS)
    if pages_are_short:
        forwards = min(forwards, SHORT_OF_PAGES_FORWARDS)
    if chunks.forwards is not None:
        forwards = min(forwards, chunks.forwards)
    if not chunks.tokens:
        until = [1] * len(until)  # were the others all to finish, nothing would be left to run
    elif num_deferred:
        forwards = min(forwards, max(prefill_forwards, 1))
    if prefill_forwards > 1:
        forwards = min(forwards, PREFILL_FORWARDS)
    if any(sequence.request.traced for sequence in everybody):
        forwards = 1
    return BurstLength(forwards, until)


def prefill_forwards(replica: Replica, chunk_tokens: int) -> int:
    """Returns the forwards until the prompts of a replica are computed; 0 if they are paused."""
    if not chunk_tokens:
        return 0
    left = sum(
        sequence.text_length_admitted - sequence.num_computed
        for sequence in replica.running
        if sequence.is_prefilling
    )
    return -(-left // chunk_tokens)


def give_pages(replica: Replica, forwards: int) -> int:
    """Gives every sequence pages for the forwards of a burst, or for fewer if there are not enough.
    There must be enough for the next forward.

    Returns:
      how many forwards the pages will probably last.
    """
    sequences = [
        (sequence, sequence.room_needed, expected_rate(sequence), sequence.longest_room)
        for sequence in replica.running
    ]
    while True:
        rooms = [
            (one, max(room, min(one.room_expected(rate, forwards - 1), longest)))
            for one, room, rate, longest in sequences
        ]
        lacking = sum(replica.lacks(one, room) for one, room in rooms)
        if forwards == 1 or lacking <= replica.num_available:
            break
        forwards //= 2
        for one, room, rate, _ in sequences:
            replica.trim(one, max(room, one.room_expected(rate, forwards - 1)))
    for one, room in rooms:
        replica.grow(one, room)
    return forwards


def expected_rate(sequence: SequenceState) -> float:
    """Returns a generous estimate of the tokens that a forward commits."""
    drafts = max(sequence.window, sequence.lookup)
    if drafts == 0:
        return 1.0
    if sequence.num_forwards < 4:
        return 1 + drafts / 4
    return 1.25 * sequence.num_output / sequence.num_forwards
