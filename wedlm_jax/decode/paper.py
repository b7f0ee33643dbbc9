"""Mode "paper": fills the masks whose prediction is certain, and commits filled slots.

The commit of the leading run is in `wedlm_jax.decode.loop.decide`. Source: WeDLM section 5.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.logits import keep_apart
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import DecodeState, is_mask


def predicted_slots(state: DecodeState) -> Array:
    """Returns the slots that need the head, bool ``[N, P+1]``: every mask predicts its own
    token."""
    return jnp.pad(is_mask(state), ((0, 0), (0, 1)))


def filled_by(state: DecodeState, options: Options, tokens: Array, entropies: Array) -> Array:
    """Chooses the masks to fill with ``tokens``, bool ``[N, P]``.

    These are all masks with H + λ·distance < τ, where the distance is counted in slots from the
    first mask; if there are none, the one with the smallest value, so that every forward makes
    progress.

    The penalty λ favours masks near the front. They complete the leading run, and only a leading
    run is committed: a far slot that is filled early waits in the window and is computed again and
    again.

    Args:
      tokens, entropies: ``[N, P]`` by slot.
    """
    assert options.position_penalty is not None
    assert options.entropy_threshold is not None
    masks = is_mask(state)
    slot = jnp.arange(masks.shape[1])
    distance = (slot - jnp.argmax(masks, axis=1)[:, None]).astype(jnp.float32)
    # H̃ = H + λ · distance, the paper's adjusted entropy.
    adjusted = entropies + options.position_penalty[:, None] * distance
    # Filled slots must win neither of the two choices below.
    adjusted = jnp.where(masks, adjusted, jnp.inf)
    # τ = None is stored as -inf: nothing is below it, and one mask per forward is filled.
    below = adjusted < options.entropy_threshold[:, None]
    smallest = slot == jnp.argmin(adjusted, axis=1)[:, None]
    chosen = jnp.where(below.any(axis=1, keepdims=True), below, smallest & masks)
    if options.bad_words is None:
        return chosen
    return keep_apart(state, options, chosen, tokens)
