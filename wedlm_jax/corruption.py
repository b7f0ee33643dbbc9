"""The dual-stream training batch, built on the device from packed clean rows.

Pure functions on static shapes: they run inside the jitted training step, so the
host ships clean tokens only. Source: WeDLM section 4.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.masks import PAD_SEGMENT, DualStreamMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Clean, block-aligned packed rows; every array ``[R, L]``.

    Attributes:
      tokens: int32 token ids in logical order, sample after sample.
      positions: int32 logical positions, from 0 in each sample.
      segment_ids: int32, 1, 2, ... for the row's samples, 0 for padding. A sample
        starts at a multiple of the block size.
      trainable: bool; False on prompt tokens (never masked, never a target) and padding.
    """

    tokens: Array
    positions: Array
    segment_ids: Array
    trainable: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DualStreamBatch:
    """What the model is fed, and what the loss needs; L and 2L as in `PackedRows`.

    Attributes:
      token_ids, positions: int32 ``[R, 2L]``, memory stream then prediction stream.
      mask: the attention specification.
      targets: int32 ``[R, L]``, the clean tokens in the prediction stream's physical order.
      masked: bool ``[R, L]``, which prediction rows are masked, in physical order.
      mask_ratio: float32 ``[R, L]``, γ of each prediction row's block.
      next_targets: int32 ``[R, L]``, the token after each memory row.
      next_valid: bool ``[R, L]``, whether that is an AR target: of the same sample,
        and trainable.
    """

    token_ids: Array
    positions: Array
    mask: DualStreamMask
    targets: Array
    masked: Array
    mask_ratio: Array
    next_targets: Array
    next_valid: Array


def sample_masks(
    key: Array, trainable: Array, block_size: int, *, suffix_share: float = 0.0
) -> tuple[Array, Array]:
    """Draws γ for every block and masks ``round(γ · count)`` of its trainable tokens,
    uniformly without replacement.

    Args:
      key: a `jax.random.key`.
      trainable: bool ``[R, L]``, B dividing L.
      block_size: B.
      suffix_share: the probability of a block to have its last trainable tokens masked
        instead, as a window of verified decoding has; static.

    Returns:
      ``masked`` bool ``[R, L]`` in logical order; ``mask_ratio`` float32 ``[R, L]``,
      the block's γ in (0, 1] at each of its tokens.
    """
    rows, length = trainable.shape
    blocks = trainable.reshape(rows, length // block_size, block_size)
    ratio_key, order_key = jax.random.split(key)
    ratio = 1.0 - jax.random.uniform(ratio_key, blocks.shape[:2])
    count = jnp.round(ratio * blocks.sum(-1)).astype(jnp.int32)
    score = jax.random.uniform(order_key, blocks.shape)
    if suffix_share:
        is_suffix = jax.random.uniform(jax.random.fold_in(key, 2), count.shape) < suffix_share
        from_behind = jnp.arange(block_size, 0, -1) / block_size
        score = jnp.where(is_suffix[..., None], from_behind, score)
    # A random rank among the trainable tokens: the others rank last.
    score = jnp.where(blocks, score, 2.0)
    rank = jnp.argsort(jnp.argsort(score, axis=-1), axis=-1)
    masked = (rank < count[..., None]) & blocks
    return masked.reshape(rows, length), jnp.repeat(ratio, block_size, axis=1)


def reorder_blocks(masked: Array, padding: Array, block_size: int) -> Array:
    """Topological reordering within each block: observed, masked, then padding.

    Args:
      masked, padding: bool ``[R, L]`` in logical order.

    Returns:
      int32 ``[R, L]``: at each physical place the logical index that stands there.
    """
    rows, length = masked.shape
    group = jnp.where(padding, 2, masked.astype(jnp.int32))
    order = jnp.argsort(group.reshape(rows, -1, block_size), axis=-1, stable=True)
    starts = jnp.arange(0, length, block_size)[:, None]
    return (order + starts).reshape(rows, length)


def dual_stream(
    rows: PackedRows, masked: Array, mask_ratio: Array, *, block_size: int, mask_token_id: int
) -> DualStreamBatch:
    """Lays the clean and the corrupted copy of every row behind each other.

    Args:
      rows: the clean rows.
      masked, mask_ratio: ``[R, L]`` in logical order, from `sample_masks` or given.
      block_size: B.
      mask_token_id: what stands in a masked input.
    """
    padding = rows.segment_ids == PAD_SEGMENT
    masked = masked & ~padding
    order = reorder_blocks(masked, padding, block_size)

    def physical(x: Array) -> Array:
        return jnp.take_along_axis(x, order, axis=1)

    targets, is_masked = physical(rows.tokens), physical(masked)
    predicted_input = jnp.where(is_masked, mask_token_id, targets)
    next_targets, next_valid = next_token_targets(rows)
    return DualStreamBatch(
        token_ids=jnp.concatenate([rows.tokens, predicted_input], axis=1),
        positions=jnp.concatenate([rows.positions, physical(rows.positions)], axis=1),
        mask=DualStreamMask(rows.segment_ids, block_size),
        targets=targets,
        masked=is_masked,
        mask_ratio=physical(mask_ratio),
        next_targets=next_targets,
        next_valid=next_valid,
    )


def next_token_targets(rows: PackedRows) -> tuple[Array, Array]:
    """The token after each one and whether it counts: never across a sample's border."""

    def shift(x: Array) -> Array:
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

    same = (shift(rows.segment_ids) == rows.segment_ids) & (rows.segment_ids != PAD_SEGMENT)
    return shift(rows.tokens), same & shift(rows.trainable)
