"""Pads each stream of a mask to whole tiles, and trims it again, for the tiled backends."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from wedlm_jax.masks import PAD_SEGMENT, CausalMask, DualStreamMask


def stream_lengths(mask: CausalMask | DualStreamMask, rows: int) -> tuple[int, ...]:
    """Returns the lengths of the streams that follow each other in ``rows`` tokens."""
    if isinstance(mask, CausalMask):
        return (rows,)
    length = mask.segment_ids.shape[1]
    return length, rows - length


def block_size_of(mask: CausalMask | DualStreamMask) -> int:
    """Returns the block size of the prediction stream; 1 if there is none."""
    return mask.block_size if isinstance(mask, DualStreamMask) else 1


def padded(length: int, tile: int) -> int:
    """Returns the length of a stream rounded up to whole tiles."""
    return -(-length // tile) * tile


def pad_streams(x: Array, lengths: Sequence[int], tile: int) -> Array:
    """Adds zero rows after each of the streams in ``[..., T, D]``, up to whole tiles."""
    if not any(length % tile for length in lengths):
        return x
    streams = jnp.split(x, [lengths[0]], axis=-2) if len(lengths) > 1 else [x]
    outer = [(0, 0)] * (x.ndim - 2)
    return jnp.concatenate(
        [jnp.pad(s, [*outer, (0, -s.shape[-2] % tile), (0, 0)]) for s in streams], axis=-2
    )


def trim_streams(x: Array, lengths: Sequence[int], tile: int) -> Array:
    """Inverts `pad_streams`."""
    if not any(length % tile for length in lengths):
        return x
    starts = [0, padded(lengths[0], tile)]
    return jnp.concatenate(
        [x[..., start : start + n, :] for start, n in zip(starts, lengths, strict=False)], axis=-2
    )


def stream_segments(mask: CausalMask | DualStreamMask, shape: tuple[int, int], tile: int) -> Array:
    """Returns the segment ids of every row of the padded streams, int32 ``[B, T]``.

    Args:
      shape: (B, T), without padding.
    """
    segments = mask.segment_ids
    if segments is None:
        segments = jnp.ones(shape, jnp.int32)
    streams = [segments]
    if isinstance(mask, DualStreamMask):
        streams.append(mask.prediction_segments())
    return jnp.concatenate([_whole_tiles(s, tile, PAD_SEGMENT) for s in streams], axis=1)


def stream_limits(mask: DualStreamMask, tile: int) -> Array:
    """Returns how many tokens of the memory come before the block of each token of the padded
    prediction stream, int32 ``[B, P * block_size]``; 0 for padding."""
    return _whole_tiles(mask.memory_before(), tile, 0)


def _whole_tiles(x: Array, tile: int, value: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % tile)), constant_values=value)
