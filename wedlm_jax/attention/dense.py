"""Attention with all scores in memory: the reference.

Arrays are grouped by KV head: queries ``[B, K, G, T, head_dim]``, keys and values
``[B, K, S, head_dim]``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def scores_of(q: Array, k: Array, visible: Array) -> Array:
    """Returns float32 scores ``[B, K, G, T, S]``, −inf where not visible ``[B, T, S]``."""
    batch, kv_heads, groups, length, head_dim = q.shape
    flat = q.reshape(batch, kv_heads, groups * length, head_dim)
    scores = jnp.einsum("bkqd,bksd->bkqs", flat, k, preferred_element_type=jnp.float32)
    scores = (scores * head_dim**-0.5).reshape(batch, kv_heads, groups, length, -1)
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def softmax(scores: Array) -> Array:
    """Computes the softmax over the last axis; zeros, with zero gradient, for a row of −inf.

    A row of padding sees nothing. The usual softmax would make it NaN, and NaN times a zero weight
    in the loss is still NaN in its gradient.
    """
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)


def mix(weights: Array, v: Array) -> Array:
    """Sums values ``[B, K, S, head_dim]`` by weight; float32 ``[B, K, G, T, head_dim]``."""
    flat = weights.astype(v.dtype).reshape(*weights.shape[:2], -1, weights.shape[-1])
    out = jnp.einsum("bkqs,bksd->bkqd", flat, v, preferred_element_type=jnp.float32)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def attend_parts(q: Array, parts: list[tuple[Array, Array]], visible: list[Array]) -> Array:
    """Attends to several key/value arrays with one softmax, without concatenating them."""
    scores = [scores_of(q, k, seen) for (k, _), seen in zip(parts, visible, strict=True)]
    weights = softmax(scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1))
    out, start = jnp.zeros((), jnp.float32), 0
    for _, v in parts:
        out = out + mix(weights[..., start : start + v.shape[2]], v)
        start += v.shape[2]
    return out.astype(q.dtype)
