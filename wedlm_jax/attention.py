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
      k, v: ``[B, K, T, head_dim]``, K dividing H.
      mask: the specification; `CachedMask` goes with ``cache``, the others without.
      cache: keys and values ``[B, K, S, head_dim]`` that stand before the queries' own.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      ``[B, T, H, head_dim]`` in the dtype of ``q``.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {implementation!r}: not in {IMPLEMENTATIONS}")
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # Queries of one KV head side by side, [B, K, G, T, head_dim]: plain batched products.
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    grouped = grouped.transpose(0, 2, 3, 1, 4)
    if isinstance(mask, CachedMask):
        if cache is None:
            raise ValueError("a CachedMask needs a cache")
        out = _attend_pieces(grouped, [cache, (k, v)], _cached_pieces(mask, cache[0], k))
    elif isinstance(mask, DualStreamMask) and implementation == "streams":
        out = _attend_streams(grouped, k, v, mask)
    else:
        visible = mask.dense(batch, length) if isinstance(mask, CausalMask) else mask.dense()
        out = _attend_pieces(grouped, [(k, v)], [visible])
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _scores(q: Array, k: Array, visible: Array) -> Array:
    """``[B, K, G, T, S]`` float32 scores, −inf where not visible ``[B, T, S]``."""
    batch, kv_heads, groups, length, head_dim = q.shape
    flat = q.reshape(batch, kv_heads, groups * length, head_dim)
    scores = jnp.einsum("bkqd,bksd->bkqs", flat, k, preferred_element_type=jnp.float32)
    scores = (scores * head_dim**-0.5).reshape(batch, kv_heads, groups, length, -1)
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def _softmax(scores: Array) -> Array:
    """Softmax over the last axis; zeros, with zero gradient, for a row of −inf."""
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)


def _mix(weights: Array, v: Array) -> Array:
    """``[B, K, G, T, head_dim]`` float32: values ``[B, K, S, head_dim]`` weighted."""
    flat = weights.astype(v.dtype).reshape(*weights.shape[:2], -1, weights.shape[-1])
    out = jnp.einsum("bkqs,bksd->bkqd", flat, v, preferred_element_type=jnp.float32)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def _attend_pieces(q: Array, pieces: list[tuple[Array, Array]], visible: list[Array]) -> Array:
    """One softmax over several key/value arrays, without concatenating them."""
    scores = [_scores(q, k, seen) for (k, _), seen in zip(pieces, visible, strict=True)]
    weights = _softmax(scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1))
    out, start = jnp.zeros((), jnp.float32), 0
    for _, v in pieces:
        out = out + _mix(weights[..., start : start + v.shape[2]], v)
        start += v.shape[2]
    return out.astype(q.dtype)


def _cached_pieces(mask: CachedMask, cache_k: Array, k: Array) -> list[Array]:
    visible = mask.dense(cache_k.shape[2], k.shape[2])
    return [visible[..., : cache_k.shape[2]], visible[..., cache_k.shape[2] :]]


def _attend_streams(q: Array, k: Array, v: Array, mask: DualStreamMask) -> Array:
    """The dual-stream pattern as three products: memory on memory, prediction on the
    memory of earlier blocks, prediction on its own block."""
    batch, length = mask.segment_ids.shape
    size = mask.block_size
    q_memory, q_pred = jnp.split(q, 2, axis=3)
    (k_memory, k_pred), (v_memory, v_pred) = (jnp.split(x, 2, axis=2) for x in (k, v))
    causal = CausalMask(mask.segment_ids).dense(batch, length)
    memory = _attend_pieces(q_memory, [(k_memory, v_memory)], [causal])

    block = jnp.arange(length) // size
    earlier = causal & (block[:, None] > block[None, :])
    scores_memory = _scores(q_pred, k_memory, earlier)

    # Own blocks: blocks become rows of the batch.
    blocks = length // size
    q_own, k_own, v_own = (_fold_blocks(x, size) for x in (q_pred, k_pred, v_pred))
    inside = CausalMask(mask.segment_ids.reshape(batch * blocks, size)).dense(batch * blocks, size)
    scores_own = _unfold_blocks(_scores(q_own, k_own, inside), batch)

    weights = _softmax(jnp.concatenate([scores_memory, scores_own], axis=-1))
    pred = _mix(weights[..., :length], v_memory)
    own = _mix(_fold_blocks(weights[..., length:], size), v_own)
    pred = (pred + _unfold_blocks(own, batch)).astype(q.dtype)
    return jnp.concatenate([memory, pred], axis=3)


def _fold_blocks(x: Array, size: int) -> Array:
    """``[B, ..., L, N]`` to ``[B * L / size, ..., size, N]``."""
    batch, *middle, length, last = x.shape
    x = x.reshape(batch, *middle, length // size, size, last)
    return jnp.moveaxis(x, -3, 1).reshape(-1, *middle, size, last)


def _unfold_blocks(x: Array, batch: int) -> Array:
    """The inverse of `_fold_blocks`."""
    rows, *middle, size, last = x.shape
    x = jnp.moveaxis(x.reshape(batch, rows // batch, *middle, size, last), 1, -3)
    return x.reshape(batch, *middle, -1, last)
