"""The preallocated KV cache: written at each row's own length, never moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.config import ModelConfig
from wedlm_jax.int8 import Int8Rows, Rows, to_float
from wedlm_jax.sharding import CACHE_AXES, constrain, on_own_shard


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values ``[num_hidden_layers, B, K, S, head_dim]``, as numbers or as `Int8Rows`."""

    keys: Rows
    values: Rows

    @property
    def size(self) -> int:
        """S: the rows each sequence has."""
        return self.keys.shape[3]

    @property
    def is_int8(self) -> bool:
        return isinstance(self.keys, Int8Rows)

    def layers(self) -> tuple[Rows, Rows]:
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

    keys: Rows
    values: Rows
    layer: Array
    live: int | None = dataclasses.field(default=None, metadata={"static": True})

    def rows(self, dtype: Any) -> tuple[Array, Array]:
        """This layer's keys and values ``[B, K, live, head_dim]``: a copy of no more than that.

        Args:
          dtype: of the numbers that `Int8Rows` become.
        """

        def of(x: Array) -> Array:
            size = x.shape[3] if self.live is None else self.live
            shape = (1, *x.shape[1:3], size, *x.shape[4:])
            return jax.lax.dynamic_slice(x, (self.layer, *[0] * (x.ndim - 1)), shape)[0]

        keys, values = jax.tree.map(of, (self.keys, self.values))
        return to_float(keys, dtype), to_float(values, dtype)


def allocate(config: ModelConfig, batch: int, size: int, dtype: Any) -> KVCache:
    """An empty cache; with the dtype int8 its rows are `Int8Rows`."""
    shape = (
        config.num_hidden_layers, batch, config.num_key_value_heads, size, config.head_dim,
    )  # fmt: skip

    def empty() -> Rows:
        values = jnp.zeros(shape, dtype)
        return Int8Rows(values, jnp.zeros(shape[:-1])) if values.dtype == jnp.int8 else values

    return laid_out(KVCache(empty(), empty()))


def laid_out(cache: KVCache) -> KVCache:
    """The cache by rows and heads on the mesh; itself where none is set."""
    return jax.tree.map(lambda x: constrain(x, *_axes(x)), cache)  # type: ignore[no-any-return]


def _axes(x: Array) -> tuple[str, ...]:
    """Of values, or of scales, which have no ``head_dim``."""
    return CACHE_AXES[: x.ndim]


def _each(
    function: Callable[..., Array], cache: KVCache, *trees: KVCache, others: Sequence[Array]
) -> KVCache:
    """``function`` of each array of the cache, those of ``trees`` beside it, and ``others`` with an
    entry a row to be changed. Each device does it with its own rows and heads: nothing of the
    cache ever moves."""

    def one(x: Array, *beside: Array) -> Array:
        axes = [_axes(x)] * (1 + len(beside)) + [ENTRIES] * len(others)
        return on_own_shard(function, axes)(x, *beside, *others)

    return jax.tree.map(one, cache, *trees)  # type: ignore[no-any-return]


ENTRIES = ("batch",)
"""Axes of an array with an entry a row to be changed: on a mesh each device has its own, as
many as any other, and names its own rows, counted from its first."""


def write(cache: KVCache, kv: tuple[Rows, Rows], starts: Array) -> KVCache:
    """Writes new rows behind what each sequence has.

    Args:
      kv: keys and values ``[num_hidden_layers, B, K, P, head_dim]``, of the cache's kind.
      starts: int32 ``[B]``, where each sequence's P rows go. ``starts + P`` must not exceed
        the cache size: XLA would move the write back over committed rows, so the engine
        allocates room for a whole window behind the last token.
    """

    def put(old: Array, new: Array, starts: Array) -> Array:
        def row(old: Array, new: Array, at: Array) -> Array:
            return jax.lax.dynamic_update_slice(old, new, (0, at, *[0] * (old.ndim - 2)))

        return jax.vmap(jax.vmap(row), in_axes=(0, 0, None))(old, new.astype(old.dtype), starts)

    return _each(put, cache, KVCache(*kv), others=[starts])


def write_rows(
    cache: KVCache, kv: tuple[Rows, Rows], places: Array, starts: Array, valid: Array
) -> KVCache:
    """Writes pieces of prompts into some rows.

    Args:
      kv: keys and values ``[num_hidden_layers, N, K, T, head_dim]``, of the cache's kind.
      places: int32 ``[N]``, the row of each piece.
      starts: int32 ``[N]``, where in that row it goes; ``starts + T`` must not exceed S.
      valid: bool ``[N]``, False for an entry that is there for the shape's sake alone.
    """

    def put(old: Array, new: Array, places: Array, starts: Array, valid: Array) -> Array:
        def one(i: Array, old: Array) -> Array:
            at: list[Any] = [0, places[i], 0, starts[i], *[0] * (old.ndim - 4)]
            piece = jax.lax.dynamic_slice_in_dim(new, i, 1, axis=1).astype(old.dtype)
            kept = jax.lax.dynamic_slice(old, at, piece.shape)
            return jax.lax.dynamic_update_slice(old, jnp.where(valid[i], piece, kept), at)

        return jax.lax.fori_loop(0, places.shape[0], one, old)

    return _each(put, cache, KVCache(*kv), others=[places, starts, valid])


def set_entries(old: Array, new: Array, places: Array, valid: Array) -> Array:
    """``old [B, ...]`` with ``new [N, ...]`` in its rows ``places [N]``, where ``valid [N]``."""

    def put(old: Array, new: Array, places: Array, valid: Array) -> Array:
        at = jnp.where(valid, places, old.shape[0])
        return old.at[at].set(new.astype(old.dtype), mode="drop")

    return on_own_shard(put, [ENTRIES] * 4)(old, new, places, valid)


def read_rows(cache: KVCache, places: Array, size: int) -> KVCache:
    """The first ``size`` keys and values of the rows ``places [N]``: a copy ``[.., N, ..]``."""

    def take(old: Array, places: Array) -> Array:
        return jnp.take(old[:, :, :, :size], places, axis=1)

    return _each(take, cache, others=[places])


def copy_rows(cache: KVCache, sources: Array, places: Array, valid: Array) -> KVCache:
    """Row ``places[i]`` becomes what row ``sources[i]`` is, one ``i`` after the other."""
    return _each(partial(_copy, axis=1), cache, others=[sources, places, valid])


def copy_entries(old: Array, sources: Array, places: Array, valid: Array) -> Array:
    """As `copy_rows`, of an array with an entry a row ``[B, ...]``."""
    return on_own_shard(partial(_copy, axis=0), [ENTRIES] * 4)(old, sources, places, valid)


def _copy(old: Array, sources: Array, places: Array, valid: Array, *, axis: int) -> Array:
    def one(i: Array, old: Array) -> Array:
        source = jnp.where(valid[i], sources[i], places[i])
        row = jax.lax.dynamic_slice_in_dim(old, source, 1, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(old, row, places[i], axis=axis)

    return jax.lax.fori_loop(0, places.shape[0], one, old)
