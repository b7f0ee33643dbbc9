"""Dual-stream attention as three dense products, for short rows.

The prediction stream attends to the memory and to its own blocks in separate products, so that no
``[2L, 2L]`` array exists; ``[L, L]`` scores do.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.dense import attend_parts, mix, scores_of, softmax
from wedlm_jax.masks import CausalMask, DualStreamMask


def attend_streams(q: Array, k: Array, v: Array, mask: DualStreamMask) -> Array:
    """Computes the dual-stream pattern as three products: memory on memory, prediction on the
    memory of earlier blocks, prediction on its own block.

    The two products of the prediction stream share one softmax: a row weighs its own block against
    the memory.
    """
    batch, length = mask.segment_ids.shape
    size, segments = mask.block_size, mask.prediction_segments()
    q_memory, q_pred = jnp.split(q, [length], axis=3)
    (k_memory, k_pred), (v_memory, v_pred) = (jnp.split(x, [length], axis=2) for x in (k, v))
    causal = CausalMask(mask.segment_ids).dense(batch, length)
    memory = attend_parts(q_memory, [(k_memory, v_memory)], [causal])
    scores_memory = scores_of(q_pred, k_memory, mask.earlier())

    # For attention within blocks, blocks become rows of the batch.
    q_own, k_own, v_own = (_fold_blocks(x, size) for x in (q_pred, k_pred, v_pred))
    folded = segments.reshape(-1, size)
    inside = CausalMask(folded).dense(*folded.shape)
    scores_own = _unfold_blocks(scores_of(q_own, k_own, inside), batch)

    weights = softmax(jnp.concatenate([scores_memory, scores_own], axis=-1))
    pred = mix(weights[..., :length], v_memory)
    own = mix(_fold_blocks(weights[..., length:], size), v_own)
    pred = (pred + _unfold_blocks(own, batch)).astype(q.dtype)
    return jnp.concatenate([memory, pred], axis=3)


def _fold_blocks(x: Array, size: int) -> Array:
    """Reshapes ``[B, ..., L, N]`` to ``[B * L / size, ..., size, N]``."""
    batch, *middle, length, last = x.shape
    x = x.reshape(batch, *middle, length // size, size, last)
    return jnp.moveaxis(x, -3, 1).reshape(-1, *middle, size, last)


def _unfold_blocks(x: Array, batch: int) -> Array:
    """Inverts `_fold_blocks`."""
    rows, *middle, size, last = x.shape
    x = jnp.moveaxis(x.reshape(batch, rows // batch, *middle, size, last), 1, -3)
    return x.reshape(batch, *middle, -1, last)
