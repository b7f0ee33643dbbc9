"""Attention masks: each attention pattern of WeDLM as a small specification.

A mask is never stored as a matrix. It is a frozen dataclass with the few arrays that vary, such as
segment ids. Its method `dense` returns the 0/1 matrix, the reference that every attention backend
must match.

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

    Without segment ids (one text per row), for four tokens::

        1 . . .
        1 1 . .
        1 1 1 .
        1 1 1 1

    Attributes:
      segment_ids: int32 ``[B, T]``, 0 for padding; None if each row is one text.
    """

    segment_ids: Array | None = None

    def dense(self, batch: int, length: int) -> Array:
        """Returns the matrix, bool ``[B, T, T]``."""
        if self.segment_ids is not None:
            return _causal(length) & _same_segment(self.segment_ids, self.segment_ids)
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
    which would give the answers away: m2 and m3 are invisible to p2 and p3. A window of streaming
    decoding sees the same: committed text, then its own slots in physical order.

    Samples are padded to whole blocks, so the pattern is the same for every row and only the
    segment ids vary. Source: WeDLM section 4.2.

    With ``before``, the prediction stream is not a copy of all blocks. `of_blocks` leaves out
    blocks that have nothing to predict, such as those of a prompt (p0 and p1 above would be absent
    without the first block), and windows of masks may follow any token (`wedlm_jax.drafter`).

    Attributes:
      segment_ids: int32 ``[B, L]``, segment ids of the memory stream; 0 for padding.
      block_size: size of a block (B in the drawing).
      before: int32 ``[B, P]``, how many tokens of the memory come before each block of the
        prediction stream. None if that is a copy of the memory, in whole blocks.
      segments: int32 ``[B, P * block_size]``, segment ids of the prediction stream; required with
        ``before``.
      unit: a power of two that divides all ``before``.
    """

    segment_ids: Array
    block_size: int = dataclasses.field(metadata={"static": True})
    before: Array | None = None
    segments: Array | None = None
    unit: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def of_blocks(cls, segment_ids: Array, block_size: int, blocks: Array) -> DualStreamMask:
        """Returns the mask of a prediction stream with some of the memory's blocks: their numbers,
        int32 ``[B, P]``, ascending; L / block_size or more is padding."""
        copied = copied_blocks(segment_ids, blocks, block_size)
        inside = blocks < segment_ids.shape[1] // block_size
        segments = jnp.where(jnp.repeat(inside, block_size, axis=1), copied, PAD_SEGMENT)
        before = jnp.where(inside, blocks * block_size, 0)
        return cls(segment_ids, block_size, before, segments, block_size & -block_size)

    def prediction_segments(self) -> Array:
        """Returns the segment ids of the prediction stream, int32 ``[B, P * block_size]``."""
        return self.segment_ids if self.segments is None else self.segments

    def memory_before(self) -> Array:
        """Returns how many tokens of the memory come before the block of each prediction token,
        int32 ``[B, P * block_size]``; ``[1, L]`` if all rows are alike."""
        if self.before is None:
            place = jnp.arange(self.segment_ids.shape[1])
            return (place // self.block_size * self.block_size)[None]
        return jnp.repeat(self.before, self.block_size, axis=1)

    def earlier(self) -> Array:
        """Returns which memory tokens each prediction token sees, bool
        ``[B, P * block_size, L]``."""
        # Strictly earlier blocks, since its own block's clean copy would give the answers away.
        before = jnp.arange(self.segment_ids.shape[1]) < self.memory_before()[..., None]
        return before & _same_segment(self.prediction_segments(), self.segment_ids)

    def dense(self) -> Array:
        """Returns the matrix, bool ``[B, T, T]`` with T = L + P * block_size."""
        batch, length = self.segment_ids.shape
        segments = self.prediction_segments()
        block = jnp.arange(segments.shape[1]) // self.block_size
        # Within a block, causal in physical order, in which observed tokens come first.
        causal = CausalMask(segments).dense(*segments.shape)
        same_block = (block[:, None] == block[None, :]) & causal
        memory = CausalMask(self.segment_ids).dense(batch, length)
        # Memory never sees the prediction stream: committed text does not depend on guesses.
        unseen = jnp.zeros((batch, length, segments.shape[1]), bool)
        return jnp.block([[memory, unseen], [self.earlier(), same_block]])


def copied_blocks(x: Array, blocks: Array, block_size: int) -> Array:
    """Returns the blocks of ``x [R, L]`` with the numbers ``blocks [R, P]`` one after the other,
    ``[R, P * block_size]``. Numbers after the last block are read as the last block."""
    rows = x.shape[0]
    cut = x.reshape(rows, -1, block_size)
    return jnp.take_along_axis(cut, blocks[..., None], axis=1, mode="clip").reshape(rows, -1)


Mask = CausalMask | DualStreamMask


def _causal(length: int) -> Array:
    return jnp.tril(jnp.ones((length, length), bool))


def _same_segment(queries: Array, keys: Array) -> Array:
    """Returns bool ``[B, T, S]`` of segment ids ``[B, T]`` and ``[B, S]``."""
    same = queries[:, :, None] == keys[:, None, :]
    return same & (queries != PAD_SEGMENT)[:, :, None]
