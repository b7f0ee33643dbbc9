"""Attention under a mask: the single dispatch to its backends, and those in dense products.

All backends compute scores, softmax and sums in float32, and return zeros for a row that sees
nothing (padding). No backend silently falls back to another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.attention.blockwise import attend_blockwise
from wedlm_jax.attention.tiles import ATTENDED
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CausalMask, DualStreamMask, Mask

IMPLEMENTATIONS = {
    "dense": "the whole mask and all scores in memory: the reference",
    "streams": "dense products of the parts that see each other; for short rows",
    "blockwise": "visible tiles only, in plain XLA, for any device; for long rows",
    "splash": "visible tiles only, in a TPU kernel",
}
"""The backends by name, and what each is for."""


def check_runs_on(implementation: str, platform: str) -> None:
    """Refuses a kernel on devices that it does not run on.

    Args:
      implementation: a name in `IMPLEMENTATIONS`.
      platform: JAX's name of a device's platform.

    Raises:
      InputError: the kernel does not run there; the message names both.
    """
    if implementation == "splash" and platform != "tpu":
        raise InputError(f"attention backend 'splash' is for TPUs, not for {platform!r}")


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    implementation: str = "streams",
    tile: int = 0,
) -> Array:
    """Computes softmax attention of queries over the keys that ``mask`` lets them see.

    Args:
      q: ``[B, T, H, head_dim]``.
      k, v: ``[B, K, T, head_dim]``, K dividing H.
      mask: which keys each query sees.
      implementation: a name in `IMPLEMENTATIONS`.
      tile: side of the splash kernel's tiles; 0 for what suits the chip.

    Returns:
      ``[B, T, H, head_dim]`` in the dtype of ``q``.
    """
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"attention backend {implementation!r}: not in {names}")
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # Grouped by KV head, [B, K, G, T, head_dim], attention is plain batched products.
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    if implementation == "blockwise":
        out = attend_blockwise(grouped, k, v, mask)
    elif implementation == "splash":
        # Pallas takes a while to import, and only TPUs need it.
        from wedlm_jax.attention.splash import attend_splash

        out = attend_splash(grouped, k, v, mask, tile=tile)
    elif implementation == "streams" and isinstance(mask, DualStreamMask):
        out = checkpoint_name(_attend_streams(grouped, k, v, mask), ATTENDED)
    else:
        visible = mask.dense(batch, length) if isinstance(mask, CausalMask) else mask.dense()
        out = checkpoint_name(_attend_dense(grouped, k, v, visible), ATTENDED)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


# Below, arrays are grouped by KV head: queries [B, K, G, T, head_dim], keys and values
# [B, K, S, head_dim].


def _attend_dense(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Computes attention with all scores in memory: the reference."""
    return _mix(_softmax(_scores(q, k, visible)), v).astype(q.dtype)


def _scores(q: Array, k: Array, visible: Array) -> Array:
    """Returns float32 scores ``[B, K, G, T, S]``, −inf where not visible ``[B, T, S]``."""
    batch, kv_heads, groups, length, head_dim = q.shape
    flat = q.reshape(batch, kv_heads, groups * length, head_dim)
    scores = jnp.einsum("bkqd,bksd->bkqs", flat, k, preferred_element_type=jnp.float32)
    scores = (scores * head_dim**-0.5).reshape(batch, kv_heads, groups, length, -1)
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def _softmax(scores: Array) -> Array:
    """Computes the softmax over the last axis; zeros, with zero gradient, for a row of −inf.

    A row of padding sees nothing. The usual softmax would make it NaN, and NaN times a zero weight
    in the loss is still NaN in its gradient.
    """
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)


def _mix(weights: Array, v: Array) -> Array:
    """Sums values ``[B, K, S, head_dim]`` by weight; float32 ``[B, K, G, T, head_dim]``."""
    flat = weights.astype(v.dtype).reshape(*weights.shape[:2], -1, weights.shape[-1])
    out = jnp.einsum("bkqs,bksd->bkqd", flat, v, preferred_element_type=jnp.float32)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def _attend_streams(q: Array, k: Array, v: Array, mask: DualStreamMask) -> Array:
    """Computes the dual-stream pattern as three products: memory on memory, prediction on the
    memory of earlier blocks, prediction on its own block.

    The two products of the prediction stream share one softmax: a row weighs its own block against
    the memory. No ``[2L, 2L]`` array exists; ``[L, L]`` scores do.
    """
    batch, length = mask.segment_ids.shape
    size, segments = mask.block_size, mask.prediction_segments()
    q_memory, q_pred = jnp.split(q, [length], axis=3)
    (k_memory, k_pred), (v_memory, v_pred) = (jnp.split(x, [length], axis=2) for x in (k, v))
    causal = CausalMask(mask.segment_ids).dense(batch, length)
    memory = _attend_dense(q_memory, k_memory, v_memory, causal)
    scores_memory = _scores(q_pred, k_memory, mask.earlier())

    # For attention within blocks, blocks become rows of the batch.
    q_own, k_own, v_own = (_fold_blocks(x, size) for x in (q_pred, k_pred, v_pred))
    folded = segments.reshape(-1, size)
    inside = CausalMask(folded).dense(*folded.shape)
    scores_own = _unfold_blocks(_scores(q_own, k_own, inside), batch)

    weights = _softmax(jnp.concatenate([scores_memory, scores_own], axis=-1))
    pred = _mix(weights[..., :length], v_memory)
    own = _mix(_fold_blocks(weights[..., length:], size), v_own)
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
