"""Which tiles a kernel visits: for each tile of queries the runs of key tiles that it may see.

A mask's static pattern says which tiles of queries and keys can meet; segment ids say which of
these do. Both are asked of whole tiles, never of pairs of rows: what exists is one truth a pair
of tiles. Seen from one tile, the visible tiles of each stream lie side by side, so that where
they begin and end is all that a kernel needs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.masks import PAD_SEGMENT


@dataclasses.dataclass(frozen=True)
class StreamLayout:
    """A mask's static part.

    Attributes:
      streams: 1 (causal) or 2 (memory, then prediction).
      length: L of one stream, padding included; all tiles divide it.
      block_size: B of the prediction stream; 1 for a causal mask.
    """

    streams: int
    length: int
    block_size: int

    def key_bounds(
        self, rows: Array, query_own: bool | Array, key_own: bool
    ) -> tuple[Array | None, Array]:
        """First and last key of one stream that each query may see, segments apart.

        Args:
          rows: int32 ``[N]``, queries of one stream, as rows of all streams.
          query_own: whether their stream is the prediction stream, as a constant or a scalar.
          key_own: whether the keys' is, which only queries of that stream may be asked.

        Returns:
          int32 ``[N]`` each; the first is None where it is the stream's first. Where the last
          stands before the first, the query sees nothing.
        """
        if query_own is False:
            return None, rows
        position = rows - self.length * jnp.asarray(query_own, jnp.int32)
        # Not below zero, and said to be so: a power of two is then divided by in one operation.
        unsigned = position.astype(jnp.uint32)
        within = jax.lax.rem(unsigned, jnp.full_like(unsigned, self.block_size)).astype(jnp.int32)
        block_start = position - within
        if key_own:
            return self.length + block_start, rows
        return None, jnp.where(query_own, block_start - 1, rows)


def visible_tiles(layout: StreamLayout, segments: Array, query_tile: int, key_tile: int) -> Array:
    """bool ``[B, query tiles, key tiles]``: whether a query may see a key of these tiles.

    No pair of rows that see each other is left out. A tile is taken to hold every segment
    between the lowest and the highest id in it.

    Args:
      segments: int32 ``[B, T]``, T the rows of all streams.
      query_tile, key_tile: rows of a tile; both divide L.
    """
    queries, keys = (_segment_range(segments, tile) for tile in (query_tile, key_tile))
    meet = (queries[0][:, :, None] <= keys[1][:, None]) & (
        keys[0][:, None] <= queries[1][:, :, None]
    )
    return meet & static_tiles(layout, query_tile, key_tile)


def static_tiles(layout: StreamLayout, query_tile: int, key_tile: int) -> np.ndarray:
    """bool ``[query tiles, key tiles]``: `visible_tiles` of rows that are one segment."""
    query = np.arange(0, layout.length, query_tile)[:, None]
    key = np.arange(0, layout.length, key_tile)[None, :]
    last_query, last_key = query + query_tile - 1, key + key_tile - 1
    causal = key <= last_query
    if layout.streams == 1:
        return causal
    size = layout.block_size
    earlier = key < last_query // size * size
    own = causal & (last_key >= query // size * size)
    return np.block([[causal, np.zeros_like(causal)], [earlier, own]])


def runs(visible: Array, streams: int) -> Array:
    """int32 ``[B, tiles, streams, 2]``: for each tile of the second axis, and each stream of the
    third, the first visible tile and the one behind the last; both 0 where there is none.

    Args:
      visible: bool ``[B, tiles, tiles of all streams]``, as from `visible_tiles`, or that with
        its last two axes exchanged.
    """
    per_stream = visible.shape[2] // streams
    visible = visible.reshape(*visible.shape[:2], streams, per_stream)
    offset = jnp.arange(streams, dtype=jnp.int32) * per_stream
    first = jnp.argmax(visible, -1).astype(jnp.int32)
    end = per_stream - jnp.argmax(visible[..., ::-1], -1).astype(jnp.int32)
    both = jnp.stack([first + offset, end + offset], -1)
    return jnp.where(visible.any(-1)[..., None], both, 0)


def _segment_range(segments: Array, tile: int) -> tuple[Array, Array]:
    """int32 ``[B, tiles]`` each: lowest and highest id in a tile; crossed in padding."""
    cut = segments.reshape(segments.shape[0], -1, tile)
    limits = np.iinfo(np.int32)
    lowest = jnp.where(cut == PAD_SEGMENT, limits.max, cut).min(-1)
    highest = jnp.where(cut == PAD_SEGMENT, limits.min, cut).max(-1)
    return lowest, highest
