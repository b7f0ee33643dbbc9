"""Attention with every score in memory: the reference, and what a decode window needs.

Arrays are grouped by KV head: queries ``[B, K, G, T, head_dim]``, keys and values
``[B, K, S, head_dim]``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def scores_of(q: Array, k: Array, visible: Array) -> Array:
    """``[B, K, G, T, S]`` float32 scores, −inf where not visible ``[B, T, S]``."""
    batch, kv_heads, groups, length, head_dim = q.shape
    flat = q.reshape(batch, kv_heads, groups * length, head_dim)
    scores = jnp.einsum("bkqd,bksd->bkqs", flat, k, preferred_element_type=jnp.float32)
    scores = (scores * head_dim**-0.5).reshape(batch, kv_heads, groups, length, -1)
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def softmax(scores: Array) -> Array:
    """Softmax over the last axis; zeros, with zero gradient, for a row of −inf."""
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)


def mix(weights: Array, v: Array) -> Array:
    """``[B, K, G, T, head_dim]`` float32: values ``[B, K, S, head_dim]`` weighted."""
    flat = weights.astype(v.dtype).reshape(*weights.shape[:2], -1, weights.shape[-1])
    out = jnp.einsum("bkqs,bksd->bkqd", flat, v, preferred_element_type=jnp.float32)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def attend_pieces(q: Array, pieces: list[tuple[Array, Array]], visible: list[Array]) -> Array:
    """One softmax over several key/value arrays, without concatenating them."""
    scores = [scores_of(q, k, seen) for (k, _), seen in zip(pieces, visible, strict=True)]
    weights = softmax(scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1))
    out, start = jnp.zeros((), jnp.float32), 0
    for _, v in pieces:
        out = out + mix(weights[..., start : start + v.shape[2]], v)
        start += v.shape[2]
    return out.astype(q.dtype)
