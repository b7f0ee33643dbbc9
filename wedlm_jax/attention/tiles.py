"""Cuts masks into tiles, for the backends that visit only visible ones. Each stream is padded to
whole tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.masks import PAD_SEGMENT, CausalMask, DualStreamMask

ATTENDED = "attended"
"""The name of attention's residuals for policies of `jax.checkpoint`: the output and, in the tiled
backends, the log of each row's sum of exponentials."""

LANES = 128
"""Tiles are multiples of the vector width."""

TILES: Mapping[str, int] = MappingProxyType(
    {"TPU v5 lite": 1024, "TPU v5": 1024, "TPU v6 lite": 1024}
)
"""The sides by kind of device. Chosen for rows of 4,096 tokens, among the sides that fit into the
chip's vector memory, by the estimate in tests/wedlm_jax/test_attention.py."""

UNKNOWN = 512
"""The side for devices that are not in `TILES`."""


def tile_side(length: int, given: int = 0, kind: str | None = None) -> int:
    """Returns the side of the kernel's tiles for streams of ``length`` tokens: no larger than the
    stream, in whole vectors.

    Args:
      given: the recipe's value; 0 chooses by device.
      kind: kind of the device; by default that of the current mesh.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if kind is None and device is not None:
        kind = device.device_kind
    return min(given or TILES.get(kind or "", UNKNOWN), padded(length, LANES))


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
        """Returns the mask within one tile, without segments: bool ``[tile, tile]``. For a grid
        with a ``unit`` it is ``[B, tile, tile]``, and ``limits`` (int32 ``[B, tile]``) are how many
        tokens of the memory come before the block of each query of the prediction stream."""
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


@dataclasses.dataclass(frozen=True)
class TiledMask:
    """A mask over streams that are padded to whole tiles.

    Attributes:
      grid: its static part.
      lengths: the lengths of the one or two streams, without padding.
      segments: int32 ``[B, T]``, segment ids of all rows, padding included.
      limits: int32 ``[B, prediction]`` for a grid with a ``unit``: how many tokens of the memory
        come before the block of each token of the prediction stream; 0 for padding. Else None.
    """

    grid: TileGrid
    lengths: tuple[int, ...]
    segments: Array
    limits: Array | None

    def pad(self, x: Array) -> Array:
        """Adds zero rows after each of the streams in ``[..., T, D]``, up to whole tiles."""
        if not any(length % self.grid.tile for length in self.lengths):
            return x
        streams = jnp.split(x, self.lengths[:-1], axis=-2)
        outer = [(0, 0)] * (x.ndim - 2)
        padding = [[*outer, (0, -s.shape[-2] % self.grid.tile), (0, 0)] for s in streams]
        return jnp.concatenate([jnp.pad(s, p) for s, p in zip(streams, padding, strict=True)], -2)

    def trim(self, x: Array) -> Array:
        """Inverts `pad`."""
        if not any(length % self.grid.tile for length in self.lengths):
            return x
        starts = (0, self.grid.memory)
        parts = zip(starts, self.lengths, strict=False)
        return jnp.concatenate([x[..., start : start + n, :] for start, n in parts], axis=-2)


def in_tiles(
    mask: CausalMask | DualStreamMask, shape: tuple[int, int], side: Callable[[int, int], int]
) -> TiledMask:
    """Cuts a mask over ``shape`` = (B, T) into tiles, whose side ``side`` returns for the length of
    the first stream and the block size."""
    limits, size, unit = None, 1, 0
    lengths: tuple[int, ...] = (shape[1],)
    if isinstance(mask, CausalMask):
        whole = jnp.ones(shape, jnp.int32)
        streams = [whole if mask.segment_ids is None else mask.segment_ids]
    else:
        streams, size = [mask.segment_ids, mask.prediction_segments()], mask.block_size
        lengths = (streams[0].shape[1], shape[1] - streams[0].shape[1])
    tile = side(lengths[0], size)

    def padded_rows(x: Array, value: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % tile)), constant_values=value)

    if isinstance(mask, DualStreamMask) and mask.before is not None:
        limits, unit = padded_rows(mask.memory_before(), 0), mask.unit
    memory, *others = (padded(length, tile) for length in lengths)
    grid = TileGrid(memory, sum(others), tile, size, unit)
    segments = jnp.concatenate([padded_rows(s, PAD_SEGMENT) for s in streams], axis=1)
    return TiledMask(grid, lengths, segments, limits)


def padded(length: int, tile: int) -> int:
    """Returns the length of a stream rounded up to whole tiles."""
    return -(-length // tile) * tile


def tiles_that_meet(grid: TileGrid, segments: Array, limits: Array | None = None) -> Array:
    """Returns for each row of a batch which tiles may be visible, bool ``[B, query tile, key
    tile]``, going by `TiledMask.segments` and `TiledMask.limits` alone; `TileGrid.visible` excludes
    further tiles."""
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
