"""Pads each stream of a mask to whole tiles, and cuts it back, for the tiled backends."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from wedlm_jax.masks import PAD_SEGMENT, CausalMask, DualStreamMask


def stream_layout(mask: CausalMask | DualStreamMask) -> tuple[int, int]:
    """Returns how many streams follow each other, and the block size of the last."""
    return (2, mask.block_size) if isinstance(mask, DualStreamMask) else (1, 1)


def pad_streams(x: Array, streams: int, padding: int) -> Array:
    """Adds ``padding`` zero rows after each of the streams in ``[..., T, D]``."""
    if not padding:
        return x
    *outer, rows, last = x.shape
    x = x.reshape(*outer, streams, rows // streams, last)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padding), (0, 0)])
    return x.reshape(*outer, -1, last)


def trim_streams(x: Array, streams: int, padding: int) -> Array:
    """Inverts `pad_streams`."""
    if not padding:
        return x
    *outer, rows, last = x.shape
    x = x.reshape(*outer, streams, rows // streams, last)
    return x[..., : rows // streams - padding, :].reshape(*outer, -1, last)


def stream_segments(
    mask: CausalMask | DualStreamMask, batch: int, rows: int, padding: int
) -> Array:
    """Returns the segment ids of every row of the padded streams, int32
    ``[B, T + streams * padding]``."""
    segments = mask.segment_ids
    if segments is None:
        segments = jnp.ones((batch, rows), jnp.int32)
    segments = jnp.pad(segments, ((0, 0), (0, padding)), constant_values=PAD_SEGMENT)
    return jnp.tile(segments, (1, 2)) if isinstance(mask, DualStreamMask) else segments
