"""What the last forward of each sequence saw and decided, for those who watch one decode.

Only programs with trait "traced" have it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.state import DecodeState, is_filled

NOTHING = -1
"""In the place of a token: a mask, or a slot that was not filled."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LastForward:
    """The last forward of a burst, of each sequence, by the slots of the window as it saw it.

    Attributes:
      ran: bool ``[N]``, whether it ran the sequence's window; the rest has no meaning otherwise.
      start: int32 ``[N]``, the logical position of slot 0.
      active: int32 ``[N]``, slots that it ran.
      held: int32 ``[N, P]``, the token of each slot, or `NOTHING` where it was a mask.
      entropies: float32 ``[N, P+1]``, nats, of the prediction for each slot and the one after
        the last; NaN where nothing was predicted.
      drafted: int32 ``[N, P]``, the token that the forward filled a mask with, or `NOTHING`.
      rejected: bool ``[N, P]``, drafts that verification threw out.
    """

    ran: Array
    start: Array
    active: Array
    held: Array
    entropies: Array
    drafted: Array
    rejected: Array


def no_forward(sequences: int, slots: int) -> LastForward:
    """Returns what there is before the first forward, for N sequences of P slots."""
    none = jnp.full((sequences, slots), NOTHING)
    return LastForward(
        ran=jnp.zeros(sequences, bool),
        start=jnp.zeros(sequences, jnp.int32),
        active=jnp.zeros(sequences, jnp.int32),
        held=none,
        entropies=jnp.zeros((sequences, slots + 1), jnp.float32),
        drafted=none,
        rejected=jnp.zeros((sequences, slots), bool),
    )


def last_forward(
    state: DecodeState,
    ran: Array,
    tokens: Array,
    entropies: Array,
    fills: Array,
    kept: Array,
) -> LastForward:
    """Notes a forward.

    Args:
      state: before it.
      ran: bool ``[N]``, whether it ran the sequence's window.
      tokens: int32 ``[N, P]``, predictions by slot.
      entropies: float32 ``[N, P+1]``, theirs, NaN where nothing was predicted.
      fills, kept: bool ``[N, P]``, masks that it fills, and filled slots that stay.
    """
    held = is_filled(state)
    return LastForward(
        ran=ran,
        start=state.window_start,
        active=state.active,
        held=jnp.where(held, state.tokens, NOTHING),
        entropies=entropies,
        drafted=jnp.where(fills, tokens, NOTHING),
        rejected=held & ~kept,
    )
