"""The visible tiles of a mask, which the tiled backends go through."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.masks import PAD_SEGMENT


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """The static part of a mask, cut into square tiles.

    Attributes:
      memory: tokens of the memory stream, or of the only stream under a causal mask.
      prediction: tokens of the prediction stream; 0 under a causal mask. Both are multiples of
        ``tile``.
      tile: rows and columns of a tile, a multiple of ``block_size``.
      block_size: B of the prediction stream; 1 for a causal mask.
      unit: 0 if the prediction stream has all blocks. If it has only some, how many tokens of the
        memory they see varies by row, and ``unit`` is a power of two that divides these numbers.
    """

    memory: int
    prediction: int
    tile: int
    block_size: int
    unit: int = 0

    def visible(self) -> np.ndarray:
        """Lists the query tile and key tile of every tile that may be visible, int32 ``[N, 2]``,
        grouped by query tile."""
        count = self.memory // self.tile
        tiles = [(i, j) for i in range(count) for j in range(i + 1)]
        for i in range(self.prediction // self.tile):
            # Tile i of the memory holds earlier blocks only if it holds more than one block.
            earlier = i if self.tile == self.block_size else i + 1
            tiles += [(count + i, j) for j in range(count if self.unit else earlier)]
            tiles.append((count + i, count + i))
        return np.array(tiles, np.int32)

    def seen(self, query_tile: Array, key_tile: Array, limits: Array | None = None) -> Array:
        """Returns the mask within one tile, without segments.

        Args:
          query_tile, key_tile: the numbers of the query tile and the key tile.
          limits: for a grid with a ``unit``, int32 ``[B, tile]``: how many tokens of the memory
            come before the block of each query of the prediction stream.

        Returns:
          bool ``[tile, tile]``, or with limits ``[B, tile, tile]``.
        """
        count = self.memory // self.tile
        within = jnp.arange(self.tile)
        query = (query_tile * self.tile + within)[:, None]
        key = (key_tile * self.tile + within)[None, :]
        causal = key <= query
        if limits is None:
            earlier = key // self.block_size < (query - self.memory) // self.block_size
        else:
            earlier = key < limits[..., None]
        # The memory stream has whole blocks, so blocks are numbered through both streams.
        own_block = causal & (key // self.block_size == query // self.block_size)
        prediction = jnp.where(key_tile < count, earlier, own_block)
        return jnp.where(query_tile < count, causal, prediction)


def tiles_that_meet(grid: TileGrid, segments: Array, limits: Array | None = None) -> Array:
    """Returns for each row of a batch which tiles may be visible, going by its segments and the
    places of its prediction blocks alone; `TileGrid.visible` excludes further tiles.

    Args:
      segments: int32 ``[B, T]`` of both streams, in which samples are numbered in order.
      limits: int32 ``[B, prediction]``, from `wedlm_jax.attention.stream_padding.stream_limits`.

    Returns:
      bool ``[B, query tile, key tile]``.
    """
    samples = segments.reshape(segments.shape[0], -1, grid.tile)
    first = jnp.where(samples == PAD_SEGMENT, jnp.iinfo(jnp.int32).max, samples).min(-1)
    last = samples.max(-1)
    # Samples of a stream are numbered in order, so two tiles share one if these ranges meet.
    meet = (first[:, :, None] <= last[:, None, :]) & (first[:, None, :] <= last[:, :, None])
    if limits is None:
        return meet
    count = grid.memory // grid.tile
    most = limits.reshape(limits.shape[0], -1, grid.tile).max(-1)
    before = jnp.arange(count) * grid.tile < most[..., None]
    return meet.at[:, count:, :count].set(meet[:, count:, :count] & before)
