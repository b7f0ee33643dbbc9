"""Attention under a mask: the single dispatch to its backends, and those in plain XLA.

All backends compute scores, softmax and sums in float32, and return zeros for a row that sees
nothing (padding). No backend silently falls back to another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.attention.tiles import ATTENDED, TileGrid, in_tiles, tiles_that_meet
from wedlm_jax.errors import InputError
from wedlm_jax.masks import PAD_SEGMENT, CausalMask, DualStreamMask, Mask

IMPLEMENTATIONS = {
    "dense": "the whole mask and all scores in memory: the reference",
    "streams": "dense products of the parts that see each other; for short rows",
    "blockwise": "visible tiles only, in plain XLA, for any device; for long rows",
    "splash": "visible tiles only, in a TPU kernel",
}
"""The backends by name, and what each is for."""


def check_runs_on(implementation: str, platform: str) -> None:
    """Refuses, with an `InputError`, a kernel on devices that it does not run on."""
    if implementation == "splash" and platform != "tpu":
        raise InputError(f"attention backend 'splash' is for TPUs, not for {platform!r}")


def attend(
    q: Array, k: Array, v: Array, mask: Mask, *, implementation: str = "streams", tile: int = 0
) -> Array:
    """Computes softmax attention of queries over the keys that ``mask`` lets them see.

    Args:
      q: ``[B, T, H, head_dim]``.
      k, v: ``[B, K, T, head_dim]``, K dividing H.
      mask: which keys each query sees.
      implementation: a name in `IMPLEMENTATIONS`.
      tile: side of the splash kernel's tiles; 0 chooses it by chip.

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
    weights = _softmax(_scores(q, k, visible))
    return _matmul(weights.astype(v.dtype), v).astype(q.dtype)


def _scores(q: Array, k: Array, visible: Array) -> Array:
    """Returns float32 scores ``[B, K, G, T, S]``, −inf where not visible ``[B, T, S]``."""
    scores = _matmul_t(q, k) * q.shape[-1] ** -0.5
    return jnp.where(visible[:, None, None], scores, -jnp.inf)


def _softmax(scores: Array) -> Array:
    """Computes the softmax over the last axis; zeros, with zero gradient, for a row of −inf.

    A row of padding sees nothing. The usual softmax would make it NaN, and NaN times a zero weight
    in the loss is still NaN in its gradient.
    """
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)


# The query heads of one KV head are rows of one product: [B, K, G * m, ·].


def _product(formula: str, x: Array, y: Array) -> Array:
    return jnp.einsum(formula, _rows(x), y, preferred_element_type=jnp.float32)


def _rows(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _matmul(x: Array, y: Array) -> Array:
    """Returns float32 ``x @ y``: ``[B, K, G, m, n]`` by ``[B, K, n, d]``."""
    return _product("bkmn,bknd->bkmd", x, y).reshape(*x.shape[:-1], -1)


def _matmul_t(x: Array, y: Array) -> Array:
    """Returns float32 ``x @ yᵀ``: ``[B, K, G, m, d]`` by ``[B, K, n, d]``."""
    return _product("bkmd,bknd->bkmn", x, y).reshape(*x.shape[:-1], -1)


def _outer(x: Array, y: Array) -> Array:
    """Returns float32 ``xᵀ @ y`` of ``[B, K, G, m, n]`` and ``[B, K, G, m, d]``, summed over G."""
    return _product("bkmn,bkmd->bknd", x, _rows(y))


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

    weights = _softmax(jnp.concatenate([scores_memory, scores_own], axis=-1)).astype(v.dtype)
    pred = _matmul(weights[..., :length], v_memory)
    own = _matmul(_fold_blocks(weights[..., length:], size), v_own)
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


# --- Visible tiles only ----------------------------------------------------------------------
#
# No [T, T] array exists. The tiles that any query may see are listed when the program is traced or,
# if blocks are left out of the prediction stream, on the device. A loop goes through the list with
# an online softmax (Milakov & Gimelshein, 2018; Dao et al., 2022, algorithm 1); the backward pass
# goes through it again and recomputes the scores. So time grows with the visible area, memory with
# T, and the program with neither.

DEFAULT_TILE = 256

Carry = tuple[Array, Array, Array]


def attend_blockwise(
    q: Array, k: Array, v: Array, mask: CausalMask | DualStreamMask, *, tile: int = DEFAULT_TILE
) -> Array:
    """Computes softmax attention of ``q [B, K, G, T, head_dim]``, grouped by KV head, over ``k, v
    [B, K, T, head_dim]``; zeros for a row that sees nothing.

    Args:
      tile: side of a tile; capped at L and rounded up to a multiple of the block size.
    """

    def side(length: int, block_size: int) -> int:
        return -(-min(tile, length) // block_size) * block_size

    tiled = in_tiles(mask, (q.shape[0], q.shape[3]), side)
    out = _tiled(tiled.grid, *map(tiled.pad, (q, k, v)), tiled.segments, tiled.limits)
    return tiled.trim(out)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(
    grid: TileGrid, q: Array, k: Array, v: Array, segments: Array, limits: Array | None
) -> Array:
    return _forward(grid, q, k, v, segments, limits)[0]


def _forward(
    grid: TileGrid, q: Array, k: Array, v: Array, segments: Array, limits: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    """Returns the output, and what the backward pass needs: the inputs, the output, and the log of
    each row's sum of exponentials, ``[B, K, G, T]``."""
    rows = q.shape[:-1]

    def body(carry: Carry, pair: Array) -> Carry:
        top, total, out = carry
        i, j = pair
        scores = _tile_scores(grid, q, k, segments, limits, i, j)
        old_top, old_total, old_out = (_take(x, i, grid.tile, 3) for x in carry)
        new_top = jnp.maximum(old_top, scores.max(-1))
        # Before a row has seen anything its top is −inf, and −inf − (−inf) would be NaN.
        shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        weights = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(old_top - shift)
        mixed = _matmul(weights.astype(v.dtype), _take(v, j, grid.tile, 2))
        top = _put(top, new_top, i, grid.tile)
        total = _put(total, old_total * decay + weights.sum(-1), i, grid.tile)
        out = _put(out, old_out * decay[..., None] + mixed, i, grid.tile)
        return top, total, out

    start = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    top, total, out = _over_tiles(grid, segments, limits, body, start)
    seen = total > 0
    out = (out / jnp.where(seen, total, 1.0)[..., None]).astype(q.dtype)
    log_total = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), 0.0)
    out, log_total = (checkpoint_name(x, ATTENDED) for x in (out, log_total))
    return out, (q, k, v, segments, limits, out, log_total)


def _backward(grid: TileGrid, saved: tuple[Any, ...], d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, segments, limits, out, log_total = saved
    scale = q.shape[-1] ** -0.5
    d_out32 = d_out.astype(jnp.float32)
    # The gradient of softmax in row i is p_ij (dp_ij − Σ_j p_ij dp_ij). The sum equals
    # dout_i · out_i, which needs no scores.
    mean = (d_out32 * out.astype(jnp.float32)).sum(-1)

    def body(carry: Carry, pair: Array) -> Carry:
        dq, dk, dv = carry
        i, j = pair
        tile = grid.tile
        scores = _tile_scores(grid, q, k, segments, limits, i, j)
        weights = jnp.exp(scores - _take(log_total, i, tile, 3)[..., None])
        d_tile = _take(d_out, i, tile, 3)
        d_weights = _matmul_t(d_tile, _take(v, j, tile, 2))
        d_scores = weights * (d_weights - _take(mean, i, tile, 3)[..., None]) * scale
        d_scores = d_scores.astype(q.dtype)
        dq_tile = _matmul(d_scores, _take(k, j, tile, 2))
        dk_tile = _outer(d_scores, _take(q, i, tile, 3))
        dv_tile = _outer(weights.astype(v.dtype), d_tile)
        dq = _put(dq, _take(dq, i, tile, 3) + dq_tile, i, tile)
        dk = _put(dk, _take(dk, j, tile, 2) + dk_tile, j, tile, axis=2)
        dv = _put(dv, _take(dv, j, tile, 2) + dv_tile, j, tile, axis=2)
        return dq, dk, dv

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    start = (zeros[0], zeros[1], zeros[2])
    dq, dk, dv = _over_tiles(grid, segments, limits, body, start)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_tiled.defvjp(_forward, _backward)


def _over_tiles(
    grid: TileGrid,
    segments: Array,
    limits: Array | None,
    body: Callable[[Carry, Array], Carry],
    carry: Carry,
) -> Carry:
    """Runs ``body`` over the visible tiles, each a pair of query tile and key tile."""
    tiles = jnp.asarray(grid.visible())
    if limits is None:
        return jax.lax.scan(lambda carry, pair: (body(carry, pair), None), carry, tiles)[0]
    # Tiles that no row of the batch sees go to the end of the list, which the loop does not reach.
    seen = tiles_that_meet(grid, segments, limits).any(0)[tiles[:, 0], tiles[:, 1]]
    tiles = tiles[jnp.argsort(~seen, stable=True)]
    return jax.lax.fori_loop(0, seen.sum(), lambda n, carry: body(carry, tiles[n]), carry)


def _tile_scores(
    grid: TileGrid, q: Array, k: Array, segments: Array, limits: Array | None, i: Array, j: Array
) -> Array:
    tile = grid.tile
    if limits is not None:
        # Those taken for a query tile of the memory are not used.
        limits = _take(limits, i - grid.memory // tile, tile, 1)
    query, key = _take(segments, i, tile, 1), _take(segments, j, tile, 1)
    same = (query[:, :, None] == key[:, None, :]) & (query != PAD_SEGMENT)[:, :, None]
    seen = same & grid.seen(i, j, limits)
    return _scores(_take(q, i, tile, 3), _take(k, j, tile, 2), seen)


def _take(x: Array, index: Array, tile: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * tile, tile, axis)


def _put(x: Array, update: Array, index: Array, tile: int, *, axis: int = 3) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, update.astype(x.dtype), index * tile, axis)
