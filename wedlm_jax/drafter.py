"""Trains a drafter: masks that learn to predict the choices of a model that stays unchanged.

A stock checkpoint then decodes in mode `verified` with masks that draft
(`wedlm_jax.decode.verified`): rows of text use the unchanged weights, and adapters act on masks
only. A mask should predict what the model's own row predicts one place earlier, once it has read
the tokens in between. That row is in the same forward, in the memory stream, so the teacher costs
no extra forward.

The prediction stream has P windows of W masks, each following a place in the memory (its
*anchor*)::

              m0 m1 m2 m3 m4 m5  a0 a1 a2        anchor 2: two tokens of text come before
        a0     1  1  .  .  .  .   1  .  .        position 2: not used, the row of m1 predicts it
        a1     1  1  .  .  .  .   1  1  .        position 3: teacher m2
        a2     1  1  .  .  .  .   1  1  1        position 4: teacher m3

This is a window of verified decoding without drafts. Its observed rows would equal those of the
memory, so the stream has only masks; and the memory depends on nothing that is trained, so the
backward pass does not go through it (`Transformer.__call__`).

A draft counts only if all drafts before it are right. So offset k has the weight
Π_{0<j<k} overlap_j, without a gradient. With total variation the losses of a window then sum to
1 - Π overlap_j. These weights act as a curriculum of growing windows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.corruption import PackedRows
from wedlm_jax.loss import LossConfig, hidden_states
from wedlm_jax.masks import PAD_SEGMENT, DualStreamMask
from wedlm_jax.model import Transformer
from wedlm_jax.model.distillation import distances


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowBatch:
    """The model's input and what the loss needs; N = P·W.

    Attributes:
      token_ids, positions: int32 ``[R, L + N]``, memory stream then windows.
      mask: the attention mask.
      targets: int32 ``[R, N]``, the tokens of the text at the masks' positions.
      teachers: int32 ``[R, N]``, the memory token whose row predicts the same position.
      has_target: bool ``[R, N]``, the masks that learn.
    """

    token_ids: Array
    positions: Array
    mask: DualStreamMask
    targets: Array
    teachers: Array
    has_target: Array


def draw_anchors(key: Array, rows: PackedRows, count: int) -> Array:
    """Draws the places of P = ``count`` windows, uniformly without replacement, among the trainable
    tokens of a single row ``[L]`` that have text before them.

    Returns:
      int32 ``[P]``, the memory token at each window's first position, ascending; L after the last.
    """
    length = rows.tokens.shape[0]
    usable = rows.trainable & (rows.segment_ids != PAD_SEGMENT) & (rows.positions > 0)
    score = jnp.where(usable, jax.random.uniform(key, (length,)), 2.0)
    chosen = jnp.argsort(score)[:count].astype(jnp.int32)
    return jnp.sort(jnp.where(usable[chosen], chosen, length))


def window_batch(rows: PackedRows, anchors: Array, width: int) -> WindowBatch:
    """Appends windows of W = ``width`` masks to packed rows, at ``anchors [R, P]`` from
    `draw_anchors`."""
    batch, length = rows.tokens.shape
    offset = jnp.arange(width, dtype=jnp.int32)
    place = (anchors[..., None] + offset).reshape(batch, -1)
    at = jnp.minimum(place, length - 1)

    def taken(x: Array, where: Array = at) -> Array:
        return jnp.take_along_axis(x, where, axis=1)

    first = jnp.repeat(taken(rows.segment_ids, jnp.minimum(anchors, length - 1)), width, axis=1)
    inside = (place < length) & (taken(rows.segment_ids) == first) & taken(rows.trainable)
    # A window ends with its text or with the trainable tokens, since later masks see earlier ones.
    inside = jnp.cumprod(inside.reshape(batch, -1, width), axis=-1).astype(bool)
    segments = jnp.where(inside.reshape(batch, -1), first, PAD_SEGMENT)
    positions = jnp.where(segments != PAD_SEGMENT, taken(rows.positions), 0)
    return WindowBatch(
        token_ids=jnp.concatenate([rows.tokens, jnp.zeros_like(place)], axis=1),
        positions=jnp.concatenate([rows.positions, positions], axis=1),
        mask=DualStreamMask(
            rows.segment_ids, width, jnp.where(anchors < length, anchors, 0), segments
        ),
        targets=taken(rows.tokens),
        teachers=jnp.maximum(at - 1, 0),
        # The row before a window already predicts its first token.
        has_target=(inside & (offset > 0)).reshape(batch, -1),
    )


def drafter_denominators(batch: WindowBatch) -> dict[str, Array]:
    """Returns the number of windows that learn, and the number of masks by offset, ``[W - 1]``."""
    has_target = _by_window(batch, batch.has_target)
    by_offset = has_target[..., 1:].sum(axis=(0, 1)).astype(jnp.float32)
    return {"windows": by_offset[0], "masks_by_offset": by_offset}


def drafter_loss(
    model: Transformer,
    batch: WindowBatch,
    denominators: dict[str, Array],
    config: LossConfig,
    *,
    distance: str,
) -> tuple[Array, dict[str, Array]]:
    """Returns this batch's share of the loss, Σ_k w_k d_k averaged over windows.

    Args:
      model: a model with adapters on masks.
      denominators: denominators of the global batch, from `drafter_denominators`.
      distance: one of `wedlm_jax.model.distillation.DISTANCES`.

    Returns:
      The scalar share; and shares of ``agreement_by_offset`` and ``overlap_by_offset``
      (``[W - 1]``: how often a mask's likeliest token is the model's, and Σ min(p, q)), and of
      ``tokens_per_forward``: one token, and the drafts before the first wrong one.
    """
    hidden = hidden_states(model, batch.token_ids, batch.positions, batch.mask, config)
    length = batch.token_ids.shape[1] - batch.targets.shape[1]
    memory, masks = jnp.split(hidden, [length], axis=1)
    if model.previous_token is not None:
        # Only masks after a window's first learn, so the token before is always the window's own.
        masks += model.correction(masks, jnp.roll(batch.targets, 1, axis=1))
    found = distances(
        masks,
        jnp.take_along_axis(memory, batch.teachers[..., None], axis=1),
        model.head_matrix(),
        batch.targets,
        batch.has_target,
        distance=distance,
        chunk=min(config.chunk, batch.targets.size),
    )
    loss, overlap, hit = (_by_window(batch, x)[..., 1:] for x in found)
    before = jnp.cumprod(jax.lax.stop_gradient(overlap), axis=-1)
    weights = jnp.concatenate([jnp.ones_like(before[..., :1]), before[..., :-1]], axis=-1)
    windows = jnp.maximum(denominators["windows"], 1.0)
    by_offset = jnp.maximum(denominators["masks_by_offset"], 1.0)
    run = jnp.cumprod(hit, axis=-1).sum(-1)
    there = _by_window(batch, batch.has_target)[..., 1]
    return (weights * loss).sum() / windows, {
        "agreement_by_offset": hit.sum(axis=(0, 1)) / by_offset,
        "overlap_by_offset": overlap.sum(axis=(0, 1)) / by_offset,
        "tokens_per_forward": jnp.where(there, 1.0 + run, 0.0).sum() / windows,
    }


def _by_window(batch: WindowBatch, x: Array) -> Array:
    """Reshapes ``[R, N]`` to ``[R, P, W]``."""
    return x.reshape(x.shape[0], -1, batch.mask.block_size)
