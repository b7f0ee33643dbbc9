"""Mode "paper": masks are filled where they are certain, and filled slots are committed.

A policy is three functions: which slots of a window need the head, which of them are filled
with what it says, and what is committed. Source: WeDLM section 5.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.bad_words import keep_apart
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import DecodeState, is_filled, is_mask


def predicted_slots(state: DecodeState) -> Array:
    """bool ``[N, P+1]``: every mask predicts itself."""
    return jnp.pad(is_mask(state), ((0, 0), (0, 1)))


def filled_by(state: DecodeState, options: Options, tokens: Array, entropies: Array) -> Array:
    """The masks to fill with ``tokens``, bool ``[N, P]``.

    Every mask with H + λ·distance < τ, where the distance counts slots from the first mask; if
    there is none, the single one with the smallest.

    Args:
      tokens, entropies: ``[N, P]`` by slot.
    """
    assert options.position_penalty is not None
    assert options.entropy_threshold is not None
    masks = is_mask(state)
    slot = jnp.arange(masks.shape[1])
    distance = (slot - jnp.argmax(masks, axis=1)[:, None]).astype(jnp.float32)
    adjusted = entropies + options.position_penalty[:, None] * distance
    adjusted = jnp.where(masks, adjusted, jnp.inf)
    below = adjusted < options.entropy_threshold[:, None]
    smallest = slot == jnp.argmin(adjusted, axis=1)[:, None]
    chosen = jnp.where(below.any(axis=1, keepdims=True), below, smallest & masks)
    if options.bad_words is None:
        return chosen
    return keep_apart(state, options, chosen, tokens)


def committed_run(state: DecodeState) -> Array:
    """int32 ``[N]``: the leading filled run, whose keys and values this forward computed on
    exactly the committed text."""
    return jnp.cumprod(is_filled(state), axis=1).sum(axis=1, dtype=jnp.int32)
