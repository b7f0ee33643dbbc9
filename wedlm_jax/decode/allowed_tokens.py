"""The tokens that a grammar allows, as bits: a host computes them before a forward, rows of logits
obey them in it.

A grammar knows what may follow a text, so it speaks of rows that see a text and nothing else: those
of filled slots in anchored sequences. Slot s of a window is the place after the text's last token
(slot 0) and the drafts in slots 1 .. s − 1. A draft that breaks the grammar is not what its row
chooses, so it is rejected, and the bits of the slots after it do not matter. Masks draft freely:
what they draft is verified.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.decode.state import HeadRows
from wedlm_jax.sharding import constrain

BITS = 32


def all_allowed(sequences: int, rows: int, vocab: int) -> np.ndarray:
    """Returns masks that allow every token, uint32 ``[N, R, V / 32]`` rounded up.

    Entry r is for slot r + 1. R is `wedlm_jax.decode.options.Traits.checked_rows`. Token t is bit
    ``t % 32`` of word ``t // 32``.
    """
    return np.full((sequences, rows, -(-vocab // BITS)), 2**BITS - 1, np.uint32)


def allowed_tokens(masks: Array, rows: HeadRows, vocab: int) -> Array:
    """Returns the tokens that each row may choose, bool ``[R, V]``; all of them for a row that is a
    mask."""
    entry = jnp.clip(rows.slot - 1, 0, masks.shape[1] - 1)
    words = masks[rows.sequence, entry]
    bits = (words[:, :, None] >> jnp.arange(BITS, dtype=jnp.uint32)) & 1
    # Every device has all bits and takes its own: else the compiler shards the words, whose bounds
    # are not those of the vocabulary's shards, and devices exchange what lies between.
    allowed = constrain(bits.reshape(words.shape[0], -1)[:, :vocab] == 1, None, None)
    return constrain(allowed | rows.is_mask[:, None], None, "vocab")
