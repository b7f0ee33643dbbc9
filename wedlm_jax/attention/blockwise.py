"""Attention over visible tiles only, in plain XLA: no ``[T, T]`` array exists.

The tiles that any query may see are listed when the program is traced. A scan walks the
list with an online softmax (Milakov & Gimelshein, 2018; Dao et al., 2022, algorithm 1), and
the backward pass walks it again and recomputes the scores. So time grows with the visible area,
memory with T, and the program with neither.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from wedlm_jax.attention.residuals import ATTENDED
from wedlm_jax.attention.stream_padding import (
    pad_streams,
    stream_layout,
    stream_segments,
    trim_streams,
)
from wedlm_jax.masks import PAD_SEGMENT, CausalMask, DualStreamMask

DEFAULT_TILE = 256


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """A mask's static part, cut into square tiles.

    Attributes:
      streams: 1 (causal) or 2 (memory, then prediction).
      length: L of one stream, a multiple of ``tile``.
      tile: rows and columns of a tile, a multiple of ``block_size``.
      block_size: B of the prediction stream; 1 for a causal mask.
    """

    streams: int
    length: int
    tile: int
    block_size: int

    def visible(self) -> np.ndarray:
        """Lists query tile and key tile of every tile that may be seen, int32 ``[N, 2]``, those of
        one query tile together."""
        count = self.length // self.tile
        tiles = [(i, j) for i in range(count) for j in range(i + 1)]
        if self.streams == 2:
            for i in range(count):
                # Tile i of the memory holds earlier blocks only if it holds more than one block.
                earlier = i if self.tile == self.block_size else i + 1
                tiles += [(count + i, j) for j in range(earlier)]
                tiles.append((count + i, count + i))
        return np.array(tiles, np.int32)

    def seen(self, query_tile: Array, key_tile: Array) -> Array:
        """Returns the mask within one tile, segments aside, bool ``[tile, tile]``."""
        count = self.length // self.tile
        query_stream, key_stream = query_tile // count, key_tile // count
        within = jnp.arange(self.tile)
        query = (query_tile % count * self.tile + within)[:, None]
        key = (key_tile % count * self.tile + within)[None, :]
        causal = key <= query
        query_block, key_block = query // self.block_size, key // self.block_size
        prediction = jnp.where(
            key_stream == 0, key_block < query_block, causal & (key_block == query_block)
        )
        return jnp.where(query_stream == 0, causal, prediction)


def attend_blockwise(
    q: Array, k: Array, v: Array, mask: CausalMask | DualStreamMask, *, tile: int = DEFAULT_TILE
) -> Array:
    """Computes softmax attention under ``mask``; zeros for a row that sees nothing.

    Args:
      q: ``[B, K, G, T, head_dim]``, grouped by KV head.
      k, v: ``[B, K, T, head_dim]``.
      mask: over T rows; T = 2L for the dual stream.
      tile: side of a tile; rounded up to a multiple of the block size, down to L.

    Returns:
      ``[B, K, G, T, head_dim]`` in the dtype of ``q``.
    """
    batch, rows = q.shape[0], q.shape[3]
    streams, block_size = stream_layout(mask)
    length = rows // streams
    side = -(-min(tile, length) // block_size) * block_size
    padding = -length % side
    grid = TileGrid(streams, length + padding, side, block_size)
    segments = stream_segments(mask, batch, rows, padding)
    q, k, v = (pad_streams(x, streams, padding) for x in (q, k, v))
    out = _tiled(grid, q, k, v, segments)
    return trim_streams(out, streams, padding)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(grid: TileGrid, q: Array, k: Array, v: Array, segments: Array) -> Array:
    return _forward(grid, q, k, v, segments)[0]


def _forward(
    grid: TileGrid, q: Array, k: Array, v: Array, segments: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Returns the output, and what the backward pass needs: inputs, output, and the log of each
    row's sum of exponentials, ``[B, K, G, T]``."""
    rows = q.shape[:-1]

    def body(carry: tuple[Array, Array, Array], pair: Array) -> tuple[tuple, None]:
        top, total, out = carry
        i, j = pair
        scores = _tile_scores(grid, q, k, segments, i, j)
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
        return (top, total, out), None

    start = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    (top, total, out), _ = jax.lax.scan(body, start, jnp.asarray(grid.visible()))
    seen = total > 0
    out = (out / jnp.where(seen, total, 1.0)[..., None]).astype(q.dtype)
    log_total = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), 0.0)
    out, log_total = (checkpoint_name(x, ATTENDED) for x in (out, log_total))
    return out, (q, k, v, segments, out, log_total)


def _backward(grid: TileGrid, saved: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, segments, out, log_total = saved
    scale = q.shape[-1] ** -0.5
    d_out32 = d_out.astype(jnp.float32)
    # The gradient of softmax in row i is p_ij (dp_ij − Σ_j p_ij dp_ij). The sum equals
    # dout_i · out_i, which needs no scores.
    mean = (d_out32 * out.astype(jnp.float32)).sum(-1)

    def body(carry: tuple[Array, Array, Array], pair: Array) -> tuple[tuple, None]:
        dq, dk, dv = carry
        i, j = pair
        tile = grid.tile
        scores = _tile_scores(grid, q, k, segments, i, j)
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
        return (dq, dk, dv), None

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    start = (zeros[0], zeros[1], zeros[2])
    (dq, dk, dv), _ = jax.lax.scan(body, start, jnp.asarray(grid.visible()))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_tiled.defvjp(_forward, _backward)


def _tile_scores(grid: TileGrid, q: Array, k: Array, segments: Array, i: Array, j: Array) -> Array:
    """Returns the float32 scores of a tile, ``[B, K, G, tile, tile]``, −inf where not visible."""
    tile = grid.tile
    scores = _matmul_t(_take(q, i, tile, 3), _take(k, j, tile, 2)) * q.shape[-1] ** -0.5
    query, key = _take(segments, i, tile, 1), _take(segments, j, tile, 1)
    same = (query[:, :, None] == key[:, None, :]) & (query != PAD_SEGMENT)[:, :, None]
    seen = same & grid.seen(i, j)
    return jnp.where(seen[:, None, None], scores, -jnp.inf)


def _take(x: Array, index: Array, tile: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * tile, tile, axis)


def _put(x: Array, update: Array, index: Array, tile: int, *, axis: int = 3) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, update.astype(x.dtype), index * tile, axis)


# The query heads of one KV head are rows of one product: [B, K, G * tile, ·].


def _matmul(x: Array, y: Array) -> Array:
    """Returns float32 ``x @ y``: ``[B, K, G, m, n]`` by ``[B, K, n, d]``."""
    flat = x.reshape(*x.shape[:2], -1, x.shape[-1])
    out = jnp.einsum("bkmn,bknd->bkmd", flat, y, preferred_element_type=jnp.float32)
    return out.reshape(*x.shape[:-1], y.shape[-1])


def _matmul_t(x: Array, y: Array) -> Array:
    """Returns float32 ``x @ yᵀ``: ``[B, K, G, m, d]`` by ``[B, K, n, d]``."""
    flat = x.reshape(*x.shape[:2], -1, x.shape[-1])
    out = jnp.einsum("bkmd,bknd->bkmn", flat, y, preferred_element_type=jnp.float32)
    return out.reshape(*x.shape[:-1], y.shape[2])


def _outer(x: Array, y: Array) -> Array:
    """Returns float32 ``xᵀ @ y`` summed over the group: ``[B, K, G, m, n]``, ``[B, K, G, m,
    d]``."""
    flat_x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    flat_y = y.reshape(*y.shape[:2], -1, y.shape[-1])
    return jnp.einsum("bkmn,bkmd->bknd", flat_x, flat_y, preferred_element_type=jnp.float32)
