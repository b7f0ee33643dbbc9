"""Attention by JAX's splash kernel for TPUs: visible tiles only.

The static part of a mask is a function of query and key index, which the kernel evaluates within
the tiles it visits; segment ids do the rest. No array of the size of a mask exists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash

# The base class of masks that are computed, not stored: private, but there is no public one.
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import (
    _ComputableMask,
)

from wedlm_jax.attention.stream_padding import (
    pad_streams,
    stream_layout,
    stream_segments,
    trim_streams,
)
from wedlm_jax.masks import PAD_SEGMENT, CausalMask, DualStreamMask
from wedlm_jax.sharding import on_own_shard

DEFAULT_TILE = 512
LANES = 128
"""Tiles are multiples of the vector width."""


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
    tile: int = DEFAULT_TILE,
    interpret: bool = False,
) -> Array:
    """Computes softmax attention under ``mask``; zeros for padding. Queries are scaled, and rounded
    to their dtype, before the kernel, which has no scale of its own.

    Args:
      q: ``[B, K, G, T, head_dim]``, grouped by KV head.
      k, v: ``[B, K, T, head_dim]``.
      mask: over T rows; T = 2L for the dual stream. B must be a power of two.
      tile: rows and columns of a tile, a multiple of 128; smaller for short rows.
      interpret: run the kernel in Python on any device, for tests.

    Returns:
      ``[B, K, G, T, head_dim]`` in the dtype of ``q``.
    """
    batch, _, groups, rows, head_dim = q.shape
    streams, block_size = stream_layout(mask)
    if block_size & (block_size - 1):
        raise ValueError(f"splash attention needs a block size that is 2^n, not {block_size}")
    length = rows // streams
    tile = min(tile, -(-length // LANES) * LANES)
    padding = -length % tile
    segments = stream_segments(mask, batch, rows, padding)
    q, k, v = (pad_streams(x, streams, padding) for x in (q, k, v))

    def local(q: Array, k: Array, v: Array, segments: Array) -> Array:
        own_batch, own_kv_heads = q.shape[:2]
        own_heads = own_kv_heads * groups
        kernel = _kernel(streams, length + padding, block_size, own_heads, tile, interpret)
        heads = (q * head_dim**-0.5).reshape(own_batch, own_heads, -1, head_dim)
        out = jax.vmap(kernel)(heads, k, v, splash.SegmentIds(segments, segments))
        # To the kernel padding is a segment like any other, whose rows see themselves.
        out = jnp.where((segments != PAD_SEGMENT)[:, None, :, None], out, 0.0)
        return out.astype(q.dtype).reshape(q.shape)

    # The compiler does not partition a kernel: each device runs it on its own rows and heads.
    local = on_own_shard(local, [("batch", "attention_heads")] * 3 + [("batch",)])
    return trim_streams(local(q, k, v, segments), streams, padding)


@lru_cache
def _pattern(streams: int, length: int, block_size: int) -> _ComputableMask:
    if streams == 2:
        return DualStreamPattern(length, block_size)
    return splash.CausalMask((length, length))


def _kernel(
    streams: int, length: int, block_size: int, heads: int, tile: int, interpret: bool
) -> Callable[..., Array]:
    """Makes the kernel for these static sizes; its mask is the same for every head."""
    pattern = _pattern(streams, length, block_size)
    sizes = splash.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_kv_compute=tile,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_kv_dkv_compute=tile,
        block_q_dq=tile,
        block_kv_dq=tile,
    )
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([pattern] * heads), block_sizes=sizes, interpret=interpret
    )
