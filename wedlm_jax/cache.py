"""The preallocated KV cache: written at each row's own length, never moved."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.config import ModelConfig
from wedlm_jax.sharding import CACHE_AXES, constrain, on_own_shard


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values ``[num_hidden_layers, B, K, S, head_dim]``."""

    keys: Array
    values: Array

    @property
    def size(self) -> int:
        """S: the rows each sequence has."""
        return self.keys.shape[3]

    def layers(self) -> tuple[Array, Array]:
        return self.keys, self.values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The cache as one layer reads it: still that of all layers, of which nothing was copied.

    Attributes:
      keys, values: ``[num_hidden_layers, B, K, S, head_dim]``.
      layer: int32, whose turn it is, from 0.
      live: rows that are read, from the first; None for all S.
    """

    keys: Array
    values: Array
    layer: Array
    live: int | None = dataclasses.field(default=None, metadata={"static": True})

    def rows(self) -> tuple[Array, Array]:
        """This layer's keys and values ``[B, K, live, head_dim]``: a copy of no more than that."""

        def of(x: Array) -> Array:
            _, batch, heads, size, width = x.shape
            shape = (1, batch, heads, size if self.live is None else self.live, width)
            return jax.lax.dynamic_slice(x, (self.layer, 0, 0, 0, 0), shape)[0]

        return of(self.keys), of(self.values)


def allocate(config: ModelConfig, batch: int, size: int, dtype: Any) -> KVCache:
    shape = (
        config.num_hidden_layers, batch, config.num_key_value_heads, size, config.head_dim,
    )  # fmt: skip
    keys, values = (constrain(jnp.zeros(shape, dtype), *CACHE_AXES) for _ in range(2))
    return KVCache(keys, values)


def write(cache: KVCache, kv: tuple[Array, Array], starts: Array) -> KVCache:
    """Writes new rows behind what each sequence has.

    Args:
      kv: keys and values ``[num_hidden_layers, B, K, P, head_dim]``.
      starts: int32 ``[B]``, where each sequence's P rows go. ``starts + P`` must not exceed
        the cache size: XLA would move the write back over committed rows, so the engine
        allocates room for a whole window behind the last token.
    """

    def put(old: Array, new: Array, starts: Array) -> Array:
        def row(old: Array, new: Array, at: Array) -> Array:
            return jax.lax.dynamic_update_slice(old, new, (0, at, 0))

        return jax.vmap(jax.vmap(row), in_axes=(0, 0, None))(old, new.astype(old.dtype), starts)

    # Each device writes its own rows and heads: nothing of the cache ever moves.
    put = on_own_shard(put, [CACHE_AXES, CACHE_AXES, ("batch",)])
    return KVCache(put(cache.keys, kv[0], starts), put(cache.values, kv[1], starts))


ENTRIES = ("batch",)
"""Axes of an array with an entry a row to be changed: on a mesh each device has its own, as
many as any other, and names its own rows, counted from its first."""


def write_rows(
    cache: KVCache, kv: tuple[Array, Array], places: Array, starts: Array, valid: Array
) -> KVCache:
    """Writes pieces of prompts into some rows.

    Args:
      kv: keys and values ``[num_hidden_layers, N, K, T, head_dim]``.
      places: int32 ``[N]``, the row of each piece.
      starts: int32 ``[N]``, where in that row it goes; ``starts + T`` must not exceed S.
      valid: bool ``[N]``, False for an entry that is there for the shape's sake alone.
    """

    def put(old: Array, new: Array, places: Array, starts: Array, valid: Array) -> Array:
        def one(i: Array, old: Array) -> Array:
            at = (0, places[i], 0, starts[i], 0)
            piece = jax.lax.dynamic_slice_in_dim(new, i, 1, axis=1).astype(old.dtype)
            kept = jax.lax.dynamic_slice(old, at, piece.shape)
            return jax.lax.dynamic_update_slice(old, jnp.where(valid[i], piece, kept), at)

        return jax.lax.fori_loop(0, places.shape[0], one, old)

    put = on_own_shard(put, [CACHE_AXES, CACHE_AXES, ENTRIES, ENTRIES, ENTRIES])
    keys, values = (
        put(old, new, places, starts, valid) for old, new in zip(cache.layers(), kv, strict=True)
    )
    return KVCache(keys, values)


def set_entries(old: Array, new: Array, places: Array, valid: Array) -> Array:
    """``old [B, ...]`` with ``new [N, ...]`` in its rows ``places [N]``, where ``valid [N]``."""

    def put(old: Array, new: Array, places: Array, valid: Array) -> Array:
        return old.at[jnp.where(valid, places, old.shape[0])].set(
            new.astype(old.dtype), mode="drop"
        )

    return on_own_shard(put, [ENTRIES] * 4)(old, new, places, valid)


def read_rows(cache: KVCache, places: Array, size: int) -> KVCache:
    """The first ``size`` keys and values of the rows ``places [N]``: a copy ``[.., N, ..]``."""

    def take(old: Array, places: Array) -> Array:
        return jnp.take(old[:, :, :, :size], places, axis=1)

    take = on_own_shard(take, [CACHE_AXES, ENTRIES])
    return KVCache(take(cache.keys, places), take(cache.values, places))


def copy_rows(cache: KVCache, sources: Array, places: Array, valid: Array) -> KVCache:
    """Row ``places[i]`` becomes what row ``sources[i]`` is, one ``i`` after the other."""
    keys, values = (_copy(old, CACHE_AXES, sources, places, valid) for old in cache.layers())
    return KVCache(keys, values)


def copy_entries(old: Array, sources: Array, places: Array, valid: Array) -> Array:
    """As `copy_rows`, of an array with an entry a row ``[B, ...]``."""
    return _copy(old, ENTRIES, sources, places, valid)


def _copy(old: Array, axes: tuple[str, ...], sources: Array, places: Array, valid: Array) -> Array:
    axis = axes.index("batch")

    def put(old: Array, sources: Array, places: Array, valid: Array) -> Array:
        def one(i: Array, old: Array) -> Array:
            source = jnp.where(valid[i], sources[i], places[i])
            row = jax.lax.dynamic_slice_in_dim(old, source, 1, axis=axis)
            return jax.lax.dynamic_update_slice_in_dim(old, row, places[i], axis=axis)

        return jax.lax.fori_loop(0, places.shape[0], one, old)

    return on_own_shard(put, [axes, ENTRIES, ENTRIES, ENTRIES])(old, sources, places, valid)
