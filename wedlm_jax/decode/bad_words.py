"""Keeps token sequences ("bad words") out of completions, although masks are filled out of order.

A program that may have bad words has room for the most that a sequence may have. Where no sequence
of a forward has any, none of it is computed.

A word can be completed at any of its places, so a token is forbidden wherever it would complete one
among the tokens that a row sees, before and after its own place. Masks filled in the same forward
do not see one another: if they complete a word together, the last of them stays masked, and the
next forward chooses again. The first mask that a forward fills is never the last of several, so
each forward still fills at least one.

The row of a filled slot sees nothing after the place that it predicts. So in anchored sequences a
token is forbidden exactly where autoregressive decoding forbids it.

Only the completion counts: a word that starts in the prompt is allowed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import DecodeState, HeadRows, is_filled
from wedlm_jax.params import NO_TOKEN

UNKNOWN = -2
"""Marks what is masked or not part of the completion. Unlike `NO_TOKEN`, which pads short words."""


def text_around(state: DecodeState, margin: int) -> Array:
    """Returns the completion around each window, int32 ``[N, E]``, `UNKNOWN` where there is no
    token.

    Slot s is entry ``margin + s``; the last slot, and the one that its row predicts, are followed
    by ``margin`` entries more.
    """
    slots = state.tokens.shape[1]
    slot = jnp.arange(-margin, slots + 1 + margin)
    place = state.window_start[:, None] + slot
    in_completion = place >= state.prompt_length[:, None]
    inside = jnp.clip(slot, 0, slots - 1)
    filled = is_filled(state)[:, inside] & (slot >= 0) & (slot < slots) & in_completion
    text = jnp.where(filled, state.tokens[:, inside], UNKNOWN)
    committed = in_completion & (place < state.text_length[:, None])
    at = jnp.clip(place, 0, state.text.shape[1] - 1)
    return jnp.where(committed, jnp.take_along_axis(state.text, at, axis=1), text)


def without_completing_tokens(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows
) -> Array:
    """Sets the logits ``[R, V]`` of tokens that would complete a word to −inf."""

    def forbid(logits: Array) -> Array:
        return forbidden(logits, completing_tokens(state, options, rows))

    return jax.lax.cond(_any_words(options), forbid, lambda logits: logits, logits)


def forbidden(logits: Array, ids: Array) -> Array:
    """Sets the logits ``[R, V]`` of tokens ``ids [R, F]`` to −inf."""
    return logits.at[logit_places(logits, ids)].set(-jnp.inf, mode="drop")


def logit_places(logits: Array, ids: Array) -> tuple[Array, Array]:
    """Returns the indices of tokens ``ids [R, F]``. A negative index would count from the end, so
    `NO_TOKEN` becomes V, which a scatter drops."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return rows, jnp.where(ids == NO_TOKEN, logits.shape[1], ids)


def _any_words(options: Options) -> Array:
    assert options.bad_words is not None
    return (options.bad_words != NO_TOKEN).any()


def completing_tokens(state: DecodeState, options: Options, rows: HeadRows) -> Array:
    """Returns the tokens that would complete a word at the rows' slots, int32 ``[R, K * L]``,
    padded with `NO_TOKEN`."""
    assert options.bad_words is not None
    words = options.bad_words[rows.sequence]
    length = words.shape[2]
    margin = length - 1
    offset = jnp.arange(-margin, margin + 1)
    around = text_around(state, margin)[
        rows.sequence[:, None], margin + rows.slot[:, None] + offset
    ]
    around = jnp.where(rows.is_mask[:, None] | (offset < 0), around, UNKNOWN)[:, None]
    exists = words != NO_TOKEN
    found = []
    for j in range(length):
        # The text where the word would be if its token j were at the slot.
        segment = around[..., margin - j : margin - j + length]
        agrees = (segment == words) | ~exists | (jnp.arange(length) == j)
        completes = agrees.all(axis=-1) & exists[..., j]
        found.append(jnp.where(completes, words[..., j], NO_TOKEN))
    return jnp.concatenate(found, axis=-1)


def keep_apart(state: DecodeState, options: Options, chosen: Array, tokens: Array) -> Array:
    """Returns which of the ``chosen [N, P]`` slots can be filled together with ``tokens [N, P]``.

    Of every word that they would complete, the last new token is left out. In anchored sequences
    nothing is: verification finds what is wrong with a draft.
    """

    def apart(chosen: Array) -> Array:
        return _apart(state, options, chosen, tokens)

    return jax.lax.cond(_any_words(options), apart, lambda chosen: chosen, chosen)


def _apart(state: DecodeState, options: Options, chosen: Array, tokens: Array) -> Array:
    assert options.bad_words is not None
    words = options.bad_words
    margin = words.shape[2] - 1
    text = text_around(state, margin)
    new = jnp.pad(chosen, ((0, 0), (margin, margin + 1)))
    text = jnp.where(new, jnp.pad(tokens, ((0, 0), (margin, margin + 1))), text)
    starts = jnp.arange(text.shape[1] - margin)
    places = starts[:, None] + jnp.arange(words.shape[2])
    exists = (words != NO_TOKEN)[:, None]
    agrees = (text[:, places][:, :, None] == words[:, None]) | ~exists
    own_new = new[:, places][:, :, None] & exists
    stands = agrees.all(axis=-1) & own_new.any(axis=-1)
    last = margin - jnp.argmax(jnp.flip(own_new, axis=-1), axis=-1)
    left_out = jnp.where(stands, starts[:, None] + last, text.shape[1])
    sequences = jnp.arange(text.shape[0])[:, None, None]
    out = jnp.zeros(text.shape, bool).at[sequences, left_out].set(True, mode="drop")
    return chosen & (options.anchored[:, None] | ~out[:, margin : margin + chosen.shape[1]])
