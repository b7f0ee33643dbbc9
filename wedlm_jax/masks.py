"""Attention masks: each attention pattern of WeDLM as a small specification.

A mask is never stored as a matrix. It is a frozen dataclass that holds the few arrays that vary
(segment ids) and can be asked for the dense 0/1 matrix (`dense`), which is the reference that every
attention backend must match.

Rows are queries, columns are keys; both are in physical order.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

PAD_SEGMENT = 0
"""Segment id of padding, which sees nothing and is seen by nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CausalMask:
    """A token sees itself and the tokens before it, within its own segment.

    Without segment ids (one text a row), for four tokens::

        1 . . .
        1 1 . .
        1 1 1 .
        1 1 1 1

    Attributes:
      segment_ids: int32 ``[B, T]``, 0 for padding; None where a row is one text.
    """

    segment_ids: Array | None = None

    def dense(self, batch: int, length: int) -> Array:
        """Returns the matrix, bool ``[B, T, T]``."""
        if self.segment_ids is not None:
            return _causal(length) & _same_segment(self.segment_ids)
        return jnp.broadcast_to(_causal(length), (batch, length, length))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DualStreamMask:
    """The training mask over a memory stream followed by a prediction stream.

    With L = 4 and B = 2 (``m`` memory, ``p`` prediction, both cut into two blocks)::

              m0 m1 m2 m3 p0 p1 p2 p3
        m0     1  .  .  .  .  .  .  .     memory: causal
        m1     1  1  .  .  .  .  .  .
        m2     1  1  1  .  .  .  .  .
        m3     1  1  1  1  .  .  .  .
        p0     .  .  .  .  1  .  .  .     prediction: the memory of earlier blocks,
        p1     .  .  .  .  1  1  .  .     and its own block, causally
        p2     1  1  .  .  .  .  1  .
        p3     1  1  .  .  .  .  1  1

    A block of the prediction stream sees the clean text before it, but not its own clean copy,
    which would give the answers away: m2 and m3 are invisible to p2 and p3. This is what a window
    of streaming decoding sees, too: committed text, then its own slots in physical order.

    Samples are padded to whole blocks, so the pattern is the same for every row and only the
    segment ids vary. Source: WeDLM section 4.2.

    Attributes:
      segment_ids: int32 ``[B, L]``, shared by both streams; 0 for padding.
      block_size: B; divides L.
    """

    segment_ids: Array
    block_size: int = dataclasses.field(metadata={"static": True})

    def dense(self) -> Array:
        """Returns the matrix, bool ``[B, 2L, 2L]``."""
        length = self.segment_ids.shape[1]
        block = jnp.arange(length) // self.block_size
        causal = _causal(length)
        # Strictly earlier blocks: its own block's clean copy would give the answers away.
        earlier = block[:, None] > block[None, :]
        # Within its block, causal in physical order: observed tokens come first.
        own = (block[:, None] == block[None, :]) & causal
        # Memory never sees the prediction stream: committed text does not depend on guesses.
        pattern = jnp.block([[causal, jnp.zeros_like(causal)], [earlier, own]])
        return pattern & _same_segment(jnp.tile(self.segment_ids, (1, 2)))


Mask = CausalMask | DualStreamMask


def _causal(length: int) -> Array:
    return jnp.tril(jnp.ones((length, length), bool))


def _same_segment(segment_ids: Array) -> Array:
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return same & (segment_ids != PAD_SEGMENT)[:, :, None]
