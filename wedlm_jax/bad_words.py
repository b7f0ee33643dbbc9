"""Sequences of tokens that a completion never has, though masks are filled out of order.

A word can be completed at any of its places, so a token is forbidden wherever it would
complete one among the tokens that stand, before it and behind it. And masks that are filled
in the same forward do not see one another: where they complete a word together, the last of
them stays masked, and the next forward chooses again. The first mask that a forward fills is
never the last of several, so each forward still fills one at least.

The completion alone counts: a word that begins in the prompt is none.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode_state import DecodeState, first_index
from wedlm_jax.sampling import NO_TOKEN

UNKNOWN = -2
"""In a text: masked, or not of the completion. Unlike `NO_TOKEN`, which ends a short word."""


def text_around(state: DecodeState, words: Array) -> Array:
    """The completion around the window: int32 ``[B, E]``, `UNKNOWN` where no token stands.

    Slot s is entry ``L - 1 + s`` for words ``[B, N, L]``; before the window and behind the
    slot that follows it there are L − 1 entries more.
    """
    margin, slots = words.shape[2] - 1, state.tokens.shape[1]
    slot = jnp.arange(-margin, slots + 1 + margin)
    index = first_index(state)[:, None] + slot
    inside = jnp.clip(slot, 0, slots - 1)
    filled = state.filled[:, inside] & (slot >= 0) & (slot < state.active[:, None]) & (index >= 0)
    text = jnp.where(filled, state.tokens[:, inside], UNKNOWN)
    committed = (index >= 0) & (index < state.num_output[:, None])
    place = jnp.clip(index, 0, state.output.shape[1] - 1)
    return jnp.where(committed, jnp.take_along_axis(state.output, place, axis=1), text)


def completing_tokens(text: Array, words: Array, slots: Array) -> Array:
    """The tokens that would complete a word at ``slots [B, W]``: int32 ``[B, W, N * L]``,
    `NO_TOKEN` where none.

    Args:
      text: as `text_around` makes it.
      words: int32 ``[B, N, L]``, filled up with `NO_TOKEN`.
    """
    length = words.shape[2]
    margin = length - 1
    places = (margin + slots)[..., None] + jnp.arange(-margin, margin + 1)
    around = text[jnp.arange(text.shape[0])[:, None, None], places]
    exists = (words != NO_TOKEN)[:, None]
    found = []
    for j in range(length):
        # What stands where the word would, if its token j were at the slot.
        segment = around[:, :, None, margin - j : margin - j + length]
        agrees = (segment == words[:, None]) | ~exists | (jnp.arange(length) == j)
        completes = agrees.all(axis=-1) & exists[..., j]
        found.append(jnp.where(completes, words[:, None, :, j], NO_TOKEN))
    return jnp.concatenate(found, axis=-1)


def keep_apart(text: Array, words: Array, slots: Array, chosen: Array, tokens: Array) -> Array:
    """Which of the ``chosen [B, W]`` slots can be filled together with ``tokens [B, W]``.

    Of every word that would then stand, the last of its new tokens is left out.
    """
    margin, size = words.shape[2] - 1, text.shape[1]
    rows = jnp.arange(text.shape[0])
    at = jnp.where(chosen, margin + slots, size)
    text = text.at[rows[:, None], at].set(tokens, mode="drop")
    new = jnp.zeros(text.shape, bool).at[rows[:, None], at].set(True, mode="drop")
    starts = jnp.arange(size - margin)
    places = starts[:, None] + jnp.arange(words.shape[2])
    exists = (words != NO_TOKEN)[:, None]
    agrees = (text[:, places][:, :, None] == words[:, None]) | ~exists
    own_new = new[:, places][:, :, None] & exists
    stands = agrees.all(axis=-1) & own_new.any(axis=-1)
    last = margin - jnp.argmax(jnp.flip(own_new, axis=-1), axis=-1)
    left_out = jnp.where(stands, starts[:, None] + last, size)
    out = jnp.zeros(text.shape, bool).at[rows[:, None, None], left_out].set(True, mode="drop")
    return chosen & ~jnp.take_along_axis(out, margin + slots, axis=1)
