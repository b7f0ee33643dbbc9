"""Grouped-query attention under a mask specification: one dispatch, named forms.

Scores, softmax and their sums are float32. A row that sees nothing (padding) gives zeros.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.masks import CachedMask, CausalMask, DualStreamMask, Mask

IMPLEMENTATIONS = ("dense", "streams")
"""``dense`` builds the whole mask and is the reference; ``streams`` computes the
prediction stream against the memory and against its own blocks apart, so that no
``[2L, 2L]`` array exists and the invisible half costs nothing."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    cache: tuple[Array, Array] | None = None,
    implementation: str = "streams",
) -> Array:
    """Softmax attention of queries over the keys that ``mask`` lets them see.

    Args:
      q: ``[B, T, H, head_dim]``.
      k, v: ``[B, T, K, head_dim]``, K dividing H.
      mask: the specification; `CachedMask` goes with ``cache``, the others without.
      cache: keys and values ``[B, S, K, head_dim]`` that stand before the queries' own.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      ``[B, T, H, head_dim]`` in the dtype of ``q``.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {implementation!r}: not in {IMPLEMENTATIONS}")
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], head_dim)
    if isinstance(mask, CachedMask):
        if cache is None:
            raise ValueError("a CachedMask needs a cache")
        out = _attend_pieces(grouped, [cache, (k, v)], _cached_pieces(mask, cache[0], k))
    elif isinstance(mask, DualStreamMask) and implementation == "streams":
        out = _attend_streams(grouped, k, v, mask)
    else:
        visible = mask.dense(batch, length) if isinstance(mask, CausalMask) else mask.dense()
        out = _attend_pieces(grouped, [(k, v)], [visible])
    return out.reshape(q.shape)


def _scores(q: Array, k: Array, visible: Array) -> Array:
    """``[B, K, G, T, S]`` float32 scores, −inf where not visible ``[B, T, S]``."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = scores * (q.shape[-1] ** -0.5)
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def _softmax(scores: Array) -> Array:
    """Softmax over the last axis; zeros, with zero gradient, for a row of −inf."""
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)


def _attend_pieces(q: Array, pieces: list[tuple[Array, Array]], visible: list[Array]) -> Array:
    """One softmax over several key/value arrays, without concatenating them."""
    scores = [_scores(q, k, seen) for (k, _), seen in zip(pieces, visible, strict=True)]
    weights = _softmax(scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1))
    out, start = jnp.zeros((), jnp.float32), 0
    for _, v in pieces:
        part = weights[..., start : start + v.shape[1]].astype(v.dtype)
        out = out + jnp.einsum("bkgts,bskd->btkgd", part, v, preferred_element_type=jnp.float32)
        start += v.shape[1]
    return out.astype(q.dtype)


def _cached_pieces(mask: CachedMask, cache_k: Array, k: Array) -> list[Array]:
    visible = mask.dense(cache_k.shape[1], k.shape[1])
    return [visible[..., : cache_k.shape[1]], visible[..., cache_k.shape[1] :]]


def _attend_streams(q: Array, k: Array, v: Array, mask: DualStreamMask) -> Array:
    """The dual-stream pattern as three products: memory on memory, prediction on the
    memory of earlier blocks, prediction on its own block."""
    batch, length = mask.segment_ids.shape
    size = mask.block_size
    (q_memory, q_pred), (k_memory, k_pred), (v_memory, v_pred) = (
        jnp.split(x, 2, axis=1) for x in (q, k, v)
    )
    causal = CausalMask(mask.segment_ids).dense(batch, length)
    memory = _attend_pieces(q_memory, [(k_memory, v_memory)], [causal])

    # Every row of a block sees the same memory: what precedes the block's first row.
    block = jnp.arange(length) // size
    earlier = causal & (block[:, None] > block[None, :])
    scores_memory = _scores(q_pred, k_memory, earlier)

    blocks = length // size
    fold = (batch * blocks, size)
    q_own, k_own, v_own = (x.reshape(*fold, *x.shape[2:]) for x in (q_pred, k_pred, v_pred))
    inside = CausalMask(mask.segment_ids.reshape(fold)).dense(*fold)
    scores_own = _scores(q_own, k_own, inside)  # [B * blocks, K, G, size, size]
    kv_heads, groups = q.shape[2:4]
    scores_own = scores_own.reshape(batch, blocks, kv_heads, groups, size, size)
    scores_own = jnp.moveaxis(scores_own, 1, 3).reshape(batch, kv_heads, groups, length, size)

    weights = _softmax(jnp.concatenate([scores_memory, scores_own], axis=-1)).astype(v.dtype)
    pred = jnp.einsum(
        "bkgts,bskd->btkgd", weights[..., :length], v_memory, preferred_element_type=jnp.float32
    )
    own = weights[..., length:].reshape(batch, kv_heads, groups, blocks, size, size)
    own = jnp.moveaxis(own, 3, 1).reshape(*fold[:1], kv_heads, groups, size, size)
    pred_own = jnp.einsum("bkgts,bskd->btkgd", own, v_own, preferred_element_type=jnp.float32)
    pred = (pred + pred_own.reshape(pred.shape)).astype(q.dtype)
    return jnp.concatenate([memory, pred], axis=1)
