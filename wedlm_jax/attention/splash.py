"""Attention by JAX's splash kernel for TPUs: visible tiles only.

The static part of a mask is a function of query and key index, which the kernel evaluates within
the tiles it visits; segment ids do the rest. No array of the size of a mask exists.

If the prediction stream has only some of the blocks, their places vary by row. The kernel reads
each query's index from an array (``q_sequence``); there the index is combined with the place of the
query's block into one number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
)

# The base class of masks that are computed, not stored: private, but there is no public one.
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import _ComputableMask

from wedlm_jax.attention.tiles import ATTENDED, TileGrid, in_tiles, tile_side, tiles_that_meet
from wedlm_jax.errors import InputError
from wedlm_jax.masks import PAD_SEGMENT, CausalMask, DualStreamMask
from wedlm_jax.sharding import on_own_shard


class DualStreamPattern(_ComputableMask):
    """The pattern of `DualStreamMask` over a grid's memory and prediction stream.

    The kernel evaluates it for every score, so each operation counts. A query at ``query`` sees the
    memory's keys ``before`` the block that its own block is a copy of, and its own block up to
    itself. The same rule fits the memory's queries, for which both parts together are causal.

    If the prediction stream has only some of the blocks, the kernel is given a number instead of a
    query's index: the low bits are the index, the bits above it count the tokens of the memory
    before the query's block, in units of the grid.

    Raises:
      InputError: such a number does not fit into 31 bits.
    """

    def __init__(self, grid: TileGrid):
        self.grid = grid
        memory, size = grid.memory, grid.block_size
        rows, shift = memory + grid.prediction, (grid.unit or size).bit_length() - 1
        bits = self._bits = (rows - 1).bit_length()
        if grid.unit and bits + (memory >> shift).bit_length() > 31:
            raise InputError(
                f"attention backend 'splash': rows of {memory:,} tokens are too long for a "
                "prediction stream with only some of the blocks"
                + f"; prediction_blocks = {memory // size} keeps all of them"
                * (grid.unit == size)
            )

        def visible(query: Array, key: Array) -> Array:
            if grid.unit:
                query, before = query & ((1 << bits) - 1), query >> bits << shift
            elif memory & (memory - 1) == 0:
                before = query & (memory - size)  # the place in its stream, in whole blocks
            else:
                place = query - memory
                before = (place + (memory & (place >> 31))) & -size
            own = query & -size
            return (key < before) | ((own <= key) & (key <= query))

        super().__init__((rows, rows), visible)
        index = self.q_sequence
        self._numbers = np.where(index < memory, index >> shift << bits, 0) | index
        if grid.unit:
            # The kernel lists tiles by these numbers, so here all blocks seem to see the whole
            # memory.
            last = np.where(index < memory, 0, memory >> shift << bits)
            self.q_sequence = (self._numbers | last).astype(np.int32)

    def numbers(self, limits: Array) -> Array:
        """Returns the numbers of the queries of one row, int32 ``[T]``, for a grid with a unit,
        from its `TiledMask.limits`."""
        blocks = jnp.pad(limits // self.grid.unit << self._bits, (self.grid.memory, 0))
        return blocks | jnp.asarray(self._numbers, jnp.int32)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DualStreamPattern) and self.grid == other.grid

    def __hash__(self) -> int:
        return hash(self.grid)


def attend_splash(
    q: Array,
    k: Array,
    v: Array,
    mask: CausalMask | DualStreamMask,
    *,
    tile: int = 0,
    interpret: bool = False,
) -> Array:
    """Computes softmax attention of ``q [B, K, G, T, head_dim]``, grouped by KV head, over
    ``k, v [B, K, T, head_dim]``; zeros for padding. The kernel does not scale scores, so queries
    are first scaled and rounded to their dtype.

    Args:
      mask: its block size must be a power of two.
      tile: as for `wedlm_jax.attention.tiles.tile_side`, a multiple of 128.
      interpret: run the kernel in Python on any device, for tests.
    """
    batch, _, groups, rows, head_dim = q.shape
    tiled = in_tiles(mask, (batch, rows), lambda length, _: tile_side(length, tile))
    grid = tiled.grid
    if grid.block_size & (grid.block_size - 1) or grid.memory % grid.block_size:
        raise ValueError(
            "splash attention: expected a block size that is a power of two and divides the stream "
            f"of {grid.memory} tokens, whole tiles of {grid.tile}, not {grid.block_size}"
        )
    by_row = [tiled.segments] if tiled.limits is None else [tiled.segments, tiled.limits]

    def local(q: Array, k: Array, v: Array, segments: Array, *limits: Array) -> Array:
        local_batch, local_kv_heads = q.shape[:2]
        local_heads = local_kv_heads * groups
        kernel = _kernel(grid, local_heads, interpret)

        def of_row(row: tuple[Array, ...]) -> Array:
            q, k, v, segments, *limits = row
            row_kernel = _of_row(kernel, grid, segments, *limits)
            attended: Any = row_kernel(q, k, v, splash.SegmentIds(segments, segments))
            return attended

        heads = (q * head_dim**-0.5).reshape(local_batch, local_heads, -1, head_dim)
        # Row by row, since each has its own tiles, and so that the parts of a query's gradient, one
        # for each key tile, are in memory for one row at a time.
        out = jax.lax.map(of_row, (heads, k, v, segments, *limits))
        # To the kernel padding is a segment like any other, whose rows see themselves.
        out = jnp.where((segments != PAD_SEGMENT)[:, None, :, None], out, 0.0)
        return out.astype(q.dtype).reshape(q.shape)

    # The compiler does not partition a kernel: each device runs it on its own rows and heads.
    axes = [("batch", "attention_heads")] * 3 + [("batch",)] * len(by_row)
    return tiled.trim(on_own_shard(local, axes)(*map(tiled.pad, (q, k, v)), *by_row))


def _of_row(
    kernel: SplashAttentionKernel, grid: TileGrid, segments: Array, limits: Array | None = None
) -> SplashAttentionKernel:
    """Returns the kernel for one row with ``segments [T]``: without the tiles in which no query and
    key belong to the same sample, and with the places of its prediction blocks.

    The kernel's own lists of tiles cover the static pattern only. They are arrays, so tiles can be
    struck from them on the device.
    """
    row_limits = None if limits is None else limits[None]
    shared = tiles_that_meet(grid, segments[None], row_limits)[0]
    # A tile of padding alone keeps its diagonal, since the kernel divides by a row's sum.
    shared |= jnp.eye(len(shared), dtype=bool)
    forward = _strike(kernel.fwd_mask_info, shared, by_key=False)
    backward = _strike(kernel.dkv_mask_info, shared, by_key=True)
    if limits is not None:
        numbers = DualStreamPattern(grid).numbers(limits)
        forward, backward = (tiles._replace(q_sequence=numbers) for tiles in (forward, backward))
    return SplashAttentionKernel(forward, None, backward, **kernel.kwargs)


def _strike(tiles: Any, shared: Array, *, by_key: bool) -> Any:
    """Strikes tiles from one of the kernel's lists, ``[1, rows, columns]``, that are not in
    ``shared`` (bool ``[query tile, key tile]``). Its ``data_next`` has the number of the key tile
    at each place, in the row of its query tile. With ``by_key``, as in the backward pass, it has
    the number of the query tile, in the column of its key tile."""
    other = tiles.data_next[0].astype(jnp.int32)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, other.shape, axis) for axis in (0, 1))
    visited = (tiles.block_mask[0] > 0) & (shared[other, column] if by_key else shared[row, other])
    # At a tile that it skips, the kernel already fetches what the next visited tile needs. It goes
    # through query tiles or, in the backward pass, key tiles, one after the other.
    in_order = jnp.transpose if by_key else jnp.asarray
    flat = in_order(visited).reshape(-1)
    places = jnp.where(flat, jnp.arange(flat.size), flat.size - 1)
    fetched = in_order(other).reshape(-1)[jax.lax.cummin(places, reverse=True)]
    fetched = in_order(fetched.reshape(in_order(other).shape))
    return tiles._replace(
        block_mask=jnp.where(visited, tiles.block_mask[0], 0).astype(tiles.block_mask.dtype)[None],
        data_next=fetched.astype(tiles.data_next.dtype)[None],
    )


@lru_cache
def _pattern(grid: TileGrid) -> _ComputableMask:
    if grid.prediction:
        return DualStreamPattern(grid)
    return splash.CausalMask((grid.memory, grid.memory))


def _kernel(grid: TileGrid, heads: int, interpret: bool) -> SplashAttentionKernel:
    """Makes the kernel for these static sizes; its mask is the same for every head.

    One kernel computes all gradients. Separate kernels for queries and keys would each compute the
    scores and their gradients: seven products per tile instead of five.
    """
    sides: Any = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), grid.tile)
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([_pattern(grid)] * heads),
        block_sizes=splash.BlockSizes(**sides, use_fused_bwd_kernel=True),
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
