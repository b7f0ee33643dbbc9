"""Attention by JAX's splash kernel for TPUs: visible tiles only.

The static part of a mask is a function of query and key index, which the kernel evaluates within
the tiles it visits; segment ids do the rest. No array of the size of a mask exists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
)

# The base class of masks that are computed, not stored: private, but there is no public one.
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import (
    _ComputableMask,
)

from wedlm_jax.attention.residuals import ATTENDED
from wedlm_jax.attention.stream_padding import (
    pad_streams,
    stream_layout,
    stream_segments,
    trim_streams,
)
from wedlm_jax.attention.tiles import tile_side
from wedlm_jax.masks import PAD_SEGMENT, CausalMask, DualStreamMask
from wedlm_jax.sharding import on_own_shard


class DualStreamPattern(_ComputableMask):
    """The static pattern of `DualStreamMask` over ``2 * length`` rows.

    Written with shifts and comparisons only, which the kernel's compiler supports.
    """

    def __init__(self, length: int, block_size: int):
        self.length, self.block_size = length, block_size
        shift = block_size.bit_length() - 1

        def visible(query: Array, key: Array) -> Array:
            causal = key <= query
            query_block, key_block = query >> shift, key >> shift
            memory = (query < length) & causal
            earlier = (key < length) & (key_block < ((query - length) >> shift))
            own = (key >= length) & causal & (key_block == query_block)
            return memory | ((query >= length) & (earlier | own))

        super().__init__((2 * length, 2 * length), visible)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DualStreamPattern) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, int]:
        return self.length, self.block_size


def attend_splash(
    q: Array,
    k: Array,
    v: Array,
    mask: CausalMask | DualStreamMask,
    *,
    tile: int = 0,
    interpret: bool = False,
) -> Array:
    """Computes softmax attention under ``mask``; zeros for padding. Queries are scaled, and rounded
    to their dtype, before the kernel, which has no scale of its own.

    Args:
      q: ``[B, K, G, T, head_dim]``, grouped by KV head.
      k, v: ``[B, K, T, head_dim]``.
      mask: over T rows; T = 2L for the dual stream. B must be a power of two.
      tile: side of a tile, a multiple of 128, smaller for short rows; 0: what `TILES` has for the
        devices of the current mesh.
      interpret: run the kernel in Python on any device, for tests.

    Returns:
      ``[B, K, G, T, head_dim]`` in the dtype of ``q``.
    """
    batch, _, groups, rows, head_dim = q.shape
    streams, block_size = stream_layout(mask)
    if block_size & (block_size - 1):
        raise ValueError(f"splash attention needs a block size that is 2^n, not {block_size}")
    length = rows // streams
    tile = tile_side(length, tile)
    padding = -length % tile
    segments = stream_segments(mask, batch, rows, padding)
    q, k, v = (pad_streams(x, streams, padding) for x in (q, k, v))

    def local(q: Array, k: Array, v: Array, segments: Array) -> Array:
        own_batch, own_kv_heads = q.shape[:2]
        own_heads = own_kv_heads * groups
        kernel = _kernel(streams, length + padding, block_size, own_heads, tile, interpret)

        def of_row(row: tuple[Array, Array, Array, Array]) -> Array:
            *qkv, segments = row
            own = _without_other_samples(kernel, segments)
            out: Any = own(*qkv, splash.SegmentIds(segments, segments))
            return out

        heads = (q * head_dim**-0.5).reshape(own_batch, own_heads, -1, head_dim)
        # Row by row: each has its own tiles, and the parts of a query's gradient, one for each key
        # tile, exist for one row at a time.
        out = jax.lax.map(of_row, (heads, k, v, segments))
        # To the kernel padding is a segment like any other, whose rows see themselves.
        out = jnp.where((segments != PAD_SEGMENT)[:, None, :, None], out, 0.0)
        return out.astype(q.dtype).reshape(q.shape)

    # The compiler does not partition a kernel: each device runs it on its own rows and heads.
    local = on_own_shard(local, [("batch", "attention_heads")] * 3 + [("batch",)])
    return trim_streams(local(q, k, v, segments), streams, padding)


def _without_other_samples(kernel: SplashAttentionKernel, segments: Array) -> SplashAttentionKernel:
    """Returns the kernel without the tiles in which no query and key are of one sample.

    The kernel's own lists of tiles know the static pattern only. They are arrays, so a tile can be
    struck from them on the device.
    """
    tile = kernel.kwargs["block_sizes"].block_q
    samples = segments.reshape(-1, tile)
    first = jnp.where(samples == PAD_SEGMENT, jnp.iinfo(jnp.int32).max, samples).min(-1)
    last = samples.max(-1)
    # Samples of a stream are numbered in order, so two tiles share one if these ranges meet. A tile
    # of padding alone keeps its diagonal: the kernel divides by a row's sum.
    shared = (first[:, None] <= last) & (first <= last[:, None]) | jnp.eye(len(first), dtype=bool)
    return SplashAttentionKernel(
        _strike(kernel.fwd_mask_info, shared, by_key=False),
        None,
        _strike(kernel.dkv_mask_info, shared, by_key=True),
        **kernel.kwargs,
    )


def _strike(tiles: Any, shared: Array, *, by_key: bool) -> Any:
    """Strikes tiles from one of the kernel's lists, ``[1, rows, columns]``.

    Args:
      tiles: the list; ``data_next`` names the key tile at each place, in the row of its query tile.
        With ``by_key``, as in the backward pass, it names the query tile, in the column of its key
        tile.
      shared: bool ``[query tile, key tile]``, which tiles may stay.
    """
    named = tiles.data_next[0].astype(jnp.int32)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, named.shape, axis) for axis in (0, 1))
    visited = (tiles.block_mask[0] > 0) & (shared[named, column] if by_key else shared[row, named])
    # While the kernel passes over a tile, it fetches already what the next visited one needs. It
    # goes through query tiles or, in the backward pass, key tiles, one after the other.
    in_order = jnp.transpose if by_key else jnp.asarray
    flat = in_order(visited).reshape(-1)
    places = jnp.where(flat, jnp.arange(flat.size), flat.size - 1)
    fetched = in_order(named).reshape(-1)[jax.lax.cummin(places, reverse=True)]
    fetched = in_order(fetched.reshape(in_order(named).shape))
    return tiles._replace(
        block_mask=jnp.where(visited, tiles.block_mask[0], 0).astype(tiles.block_mask.dtype)[None],
        data_next=fetched.astype(tiles.data_next.dtype)[None],
    )


@lru_cache
def _pattern(streams: int, length: int, block_size: int) -> _ComputableMask:
    if streams == 2:
        return DualStreamPattern(length, block_size)
    return splash.CausalMask((length, length))


def _kernel(
    streams: int, length: int, block_size: int, heads: int, tile: int, interpret: bool
) -> SplashAttentionKernel:
    """Makes the kernel for these static sizes; its mask is the same for every head.

    One kernel makes all gradients: apart, those of queries and of keys would each compute the
    scores and their gradients, seven products a tile instead of five.
    """
    pattern = _pattern(streams, length, block_size)
    sizes = splash.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        use_fused_bwd_kernel=True,
    )
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([pattern] * heads),
        block_sizes=sizes,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
