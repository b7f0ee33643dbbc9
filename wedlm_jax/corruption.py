"""Builds the dual-stream training batch on the device, from packed clean examples.

Pure functions on static shapes, which run inside the jitted training step: the host sends only
clean tokens, and every step masks them again. Source: WeDLM section 4.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.masks import PAD_SEGMENT, DualStreamMask, copied_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Clean, block-aligned packed examples; arrays ``[R, L]``, except for the last two.

    Attributes:
      tokens: int32 token ids in logical order, sample after sample.
      positions: int32 logical positions, from 0 in each sample.
      segment_ids: int32, 1, 2, ... for the samples of an example, 0 for padding. A sample starts at
        a multiple of the block size.
      trainable: bool; False on prompt tokens (never masked, never a target) and padding.
      source: bool ``[R, S]``, which of S data sources an example comes from; None if losses are not
        reported by source.
      prediction_blocks: int32 ``[R, P]``, the blocks in the prediction stream, ascending; these
        include all blocks with a trainable token. Padded with L / B. None for all blocks.
    """

    tokens: Array
    positions: Array
    segment_ids: Array
    trainable: Array
    source: Array | None = None
    prediction_blocks: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DualStreamBatch:
    """The model's input and what the loss needs. The prediction stream has N = P·B tokens, or L if
    it has all blocks.

    Attributes:
      token_ids, positions: int32 ``[R, L + N]``, memory stream then prediction stream.
      mask: the attention mask.
      targets: int32 ``[R, N]``, the clean tokens in the prediction stream's physical order.
      masked: bool ``[R, N]``, which prediction tokens are masked, in physical order.
      mask_ratio: float32 ``[R, N]``, γ of each prediction token's block.
      next_targets: int32 ``[R, L]``, the token after each memory token.
      next_valid: bool ``[R, L]``, whether that is an AR target: in the same sample, and trainable.
      source: as in `PackedRows`.
    """

    token_ids: Array
    positions: Array
    mask: DualStreamMask
    targets: Array
    masked: Array
    mask_ratio: Array
    next_targets: Array
    next_valid: Array
    source: Array | None = None


def sample_masks(
    key: Array, trainable: Array, block_size: int, *, suffix_share: float = 0.0
) -> tuple[Array, Array]:
    """Draws γ for every block and masks ``round(γ · count)`` of its trainable tokens, uniformly
    without replacement.

    One γ per block rather than one per sample, so that every example trains many mask ratios.

    Args:
      trainable: bool ``[R, L]``, B dividing L.
      suffix_share: the probability that a block's last trainable tokens are masked instead, as in a
        window of verified decoding; static.

    Returns:
      ``masked`` bool ``[R, L]`` in logical order; ``mask_ratio`` float32 ``[R, L]``, the γ in
      (0, 1] of each token's block.
    """
    rows, length = trainable.shape
    blocks = trainable.reshape(rows, length // block_size, block_size)
    ratio_key, order_key = jax.random.split(key)
    # uniform() is in [0, 1); the loss divides by γ, so it must be in (0, 1].
    ratio = 1.0 - jax.random.uniform(ratio_key, blocks.shape[:2])
    # Only trainable tokens count: γ = 1 masks the whole answer, never the prompt.
    count = jnp.round(ratio * blocks.sum(-1)).astype(jnp.int32)
    score = jax.random.uniform(order_key, blocks.shape)
    if suffix_share:
        # A separate random stream, so that the share changes no other block's masks.
        is_suffix = jax.random.uniform(jax.random.fold_in(key, 2), count.shape) < suffix_share
        # Scores fall from left to right, so the last tokens rank first.
        last_first = jnp.arange(block_size, 0, -1) / block_size
        score = jnp.where(is_suffix[..., None], last_first, score)
    # The rank of a random score is a random permutation, so ranks below ``count`` are a uniform
    # choice without replacement, at static shapes. argsort of argsort turns scores into ranks.
    # Tokens that are not trainable rank last.
    score = jnp.where(blocks, score, 2.0)
    rank = jnp.argsort(jnp.argsort(score, axis=-1), axis=-1)
    masked = (rank < count[..., None]) & blocks
    return masked.reshape(rows, length), jnp.repeat(ratio, block_size, axis=1)


def reorder_blocks(masked: Array, padding: Array, block_size: int) -> Array:
    """Reorders each block topologically: observed tokens, then masked ones, then padding.

    Under the causal mask every masked token then sees all observed tokens of its block, on either
    side, and observed tokens never see a mask.

    Args:
      masked, padding: bool ``[R, L]`` in logical order.

    Returns:
      int32 ``[R, L]``: the logical index at each physical place.
    """
    rows, length = masked.shape
    # Sorted by group alone; the sort is stable, so each group keeps its logical order:
    #   logical    a  b  c  d        physical   a  c  b  d
    #   masked     .  1  .  1        positions  0  2  1  3
    group = jnp.where(padding, 2, masked.astype(jnp.int32))
    order = jnp.argsort(group.reshape(rows, -1, block_size), axis=-1, stable=True)
    starts = jnp.arange(0, length, block_size)[:, None]
    return (order + starts).reshape(rows, length)


def dual_stream(
    rows: PackedRows, masked: Array, mask_ratio: Array, *, block_size: int, mask_token_id: int
) -> DualStreamBatch:
    """Concatenates a clean and a corrupted copy of every example; ``masked`` and ``mask_ratio`` are
    ``[R, L]`` in logical order, as from `sample_masks`."""
    padding = rows.segment_ids == PAD_SEGMENT
    masked = masked & ~padding
    order = reorder_blocks(masked, padding, block_size)
    mask = DualStreamMask(rows.segment_ids, block_size)
    if rows.prediction_blocks is not None:
        mask = DualStreamMask.of_blocks(rows.segment_ids, block_size, rows.prediction_blocks)
        order = copied_blocks(order, rows.prediction_blocks, block_size)

    def physical(x: Array) -> Array:
        return jnp.take_along_axis(x, order, axis=1)

    # A mask predicts the token at its own position, so its target is the clean token there, not the
    # next one as in AR.
    targets = physical(rows.tokens)
    is_masked = physical(masked)
    if rows.prediction_blocks is not None:
        # After the last block there is padding.
        is_masked &= mask.prediction_segments() != PAD_SEGMENT
    predicted_input = jnp.where(is_masked, mask_token_id, targets)
    next_targets, next_valid = next_token_targets(rows)
    return DualStreamBatch(
        # The memory stream stays clean and in order, like committed text in decoding.
        token_ids=jnp.concatenate([rows.tokens, predicted_input], axis=1),
        # Both copies of a token have its logical position; only the order in the arrays differs.
        positions=jnp.concatenate([rows.positions, physical(rows.positions)], axis=1),
        mask=mask,
        targets=targets,
        masked=is_masked,
        mask_ratio=physical(mask_ratio),
        next_targets=next_targets,
        next_valid=next_valid,
        source=rows.source,
    )


def next_token_targets(rows: PackedRows) -> tuple[Array, Array]:
    """Returns the token after each one, and whether it is a target: never across samples."""

    def shift(x: Array) -> Array:
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

    same = (shift(rows.segment_ids) == rows.segment_ids) & (rows.segment_ids != PAD_SEGMENT)
    return shift(rows.tokens), same & shift(rows.trainable)
