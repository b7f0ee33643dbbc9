"""The pool of pages with the keys and values of all sequences, and which tokens read which pages.

The pool is one array for all layers, ``[layers * num_pages, page_size, 2 * K, head_dim]``, in which
index 2k of the third axis is key head k and 2k + 1 value head k. Layer l owns the pages from
``l * num_pages`` on. No layer is ever sliced out of the array, so loops update it in place.

Page 0 of each layer is the *trash page*: no sequence owns it, and padding is written there.

Keys and values may be rounded to 8-bit integers, with a scale for each head of each token. They are
rounded before their first use, even by their own forward. So a completion depends neither on chunks
and sizes nor, in mode "verified", on the window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from wedlm_jax.config import ModelConfig
from wedlm_jax.sharding import AXIS_RULES, shards

LARGEST = 127.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Rows:
    """``values`` (int8 ``[..., head_dim]``, −127 to 127) times ``scales`` (float32 ``[...]``).

    The scales are separate: among the values, each would take a whole vector's space on a TPU.
    """

    values: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Rows = Array | Int8Rows
"""Keys or values, ``[..., head_dim]``."""


def to_int8(x: Array) -> Int8Rows:
    """Rounds ``x [..., head_dim]`` to 255 steps, scaled by the largest magnitude of each row."""
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(axis=-1) / LARGEST
    steps = x / jnp.where(scales > 0, scales, 1.0)[..., None]
    return Int8Rows(jnp.round(steps).astype(jnp.int8), scales)


def to_float(rows: Rows, dtype: Any) -> Array:
    """Returns the rows as floats; a float array unchanged."""
    if not isinstance(rows, Int8Rows):
        return rows
    return (rows.values.astype(jnp.float32) * rows.scales[..., None]).astype(dtype)


Pages = Rows
"""``[layers * num_pages, page_size, 2 * K, head_dim]``: floats, or `Int8Rows` with a scale for each
token and head."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spans:
    """Maps the flat tokens of a forward to N sequences and their pages.

    Attributes:
      query_starts: int32 ``[N + 1]``; sequence i has the flat tokens from ``query_starts[i]`` to
        ``query_starts[i + 1]``. Those from ``query_starts[N]`` on are padding.
      kv_lengths: int32 ``[N]``, tokens in the pages, this span's included; 0 without a span.
      page_table: int32 ``[N, max_pages]``, pages of each sequence in order; 0 where it has none.
    """

    query_starts: Array
    kv_lengths: Array
    page_table: Array

    @property
    def num_sequences(self) -> int:
        return self.kv_lengths.shape[0]

    def owners(self, size: int) -> tuple[Array, Array, Array]:
        """Returns for each of T = ``size`` flat tokens its sequence and its place in it, int32
        ``[T]``, and whether it is a real token, bool ``[T]``. For padding the first two are in
        range, but meaningless."""
        token = jnp.arange(size, dtype=jnp.int32)
        # For few sequences, comparing with all starts is faster than a binary search.
        before = (token[:, None] >= self.query_starts[None, 1:]).sum(axis=1, dtype=jnp.int32)
        sequence = jnp.minimum(before, self.num_sequences - 1)
        place = self.kv_lengths[sequence] - (self.query_starts[sequence + 1] - token)
        return sequence, jnp.maximum(place, 0), before < self.num_sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageCopies:
    """Places, int32 ``[C]`` as from `token_places`, between which every layer copies keys and
    values."""

    sources: Array
    targets: Array


def allocate_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype: Any, *, replicas: int = 1
) -> Pages:
    """Allocates a pool; under a mesh it is sharded by replicas and heads.

    Args:
      num_pages: number of pages per layer and replica, the trash page included.
      dtype: dtype of the values; int8 for `Int8Rows`.
      replicas: number of pools, which follow each other in the first axis.
    """
    shape = (
        replicas * config.num_hidden_layers * num_pages,
        page_size,
        2 * config.num_key_value_heads,
        config.head_dim,
    )
    with_scales = jnp.dtype(dtype) == jnp.int8

    def empty() -> Pages:
        values = jnp.zeros(shape, dtype)
        return Int8Rows(values, jnp.zeros(shape[:-1])) if with_scales else values

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return empty()
    # Inside jit no device ever allocates more than its own shard.
    heads = PartitionSpec("data", None, AXIS_RULES["attention_heads"])
    return jax.jit(
        lambda: jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, heads), empty())
    )()  # type: ignore[no-any-return]


HEADS = PartitionSpec(None, AXIS_RULES["attention_heads"])
"""How ``[T, H, head_dim]`` is sharded."""


def pool_spec(pages: Pages) -> Any:
    """Returns how a pool is sharded: by heads."""
    spec = PartitionSpec(None, None, AXIS_RULES["attention_heads"])
    return jax.tree.map(lambda _: spec, pages)


def on_own_heads(function: Callable[..., Any], specs: list[Any], out: Any) -> Callable[..., Any]:
    """Makes each device run ``function`` on its own heads, since the compiler cannot partition a
    kernel and must not gather a pool. Returns ``function`` itself if heads are not sharded."""
    if shards("attention_heads") == 1:
        return function
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(
        function, in_specs=tuple(specs), out_specs=out, axis_names=free, check_vma=False
    )


def token_places(spans: Spans, size: int, page_size: int) -> Array:
    """Returns where the keys and values of T = ``size`` flat tokens go in the pages of layer 0:
    int32 ``[T]``, ``page * page_size + offset``; for padding, places in the trash page."""
    sequence, place, real = spans.owners(size)
    page = spans.page_table[sequence, place // page_size]
    padding = jnp.arange(size, dtype=jnp.int32) % page_size
    return jnp.where(real, page * page_size + place % page_size, padding)


def write_pages(
    pages: Pages,
    keys: Array,
    values: Array,
    places: Array,
    layer: Array | int,
    num_pages: int,
    copies: PageCopies | None = None,
) -> Pages:
    """Writes keys and values of T flat tokens into the pages of a layer, in place.

    Args:
      pages: the pool, of one replica.
      keys, values: ``[T, K, head_dim]``.
      places: int32 ``[T]``, from `token_places`.
      layer: its number, from 0.
      num_pages: number of pages per layer.
      copies: what is copied afterwards.
    """

    def local(
        pages: Pages,
        keys: Array,
        values: Array,
        places: Array,
        layer: Array,
        copies: PageCopies | None,
    ) -> Pages:
        size, kv_heads, head_dim = keys.shape
        new = jnp.stack([keys, values], axis=2).reshape(size, 2 * kv_heads, head_dim)
        if size == 1:
            # XLA turns a scatter of a single row into a slice update, which on a CPU copies the
            # whole pool. So a second row is written, to the trash page.
            new = jnp.concatenate([new, new])
            places = jnp.concatenate([places, jnp.zeros_like(places)])
        page_size = pages.shape[1]
        first = layer * num_pages * page_size
        at = places + first

        def put(pool: Array, rows: Array) -> Array:
            flat = pool.reshape(-1, *pool.shape[2:])
            flat = flat.at[at].set(rows.astype(pool.dtype), mode="promise_in_bounds")
            if copies is not None:
                moved = flat.at[copies.sources + first].get(mode="promise_in_bounds")
                flat = flat.at[copies.targets + first].set(moved, mode="promise_in_bounds")
            return flat.reshape(pool.shape)

        return jax.tree.map(put, pages, to_int8(new) if isinstance(pages, Int8Rows) else new)  # type: ignore[no-any-return]

    whole = PartitionSpec()
    specs = [pool_spec(pages), HEADS, HEADS, whole, whole, whole]
    return on_own_heads(local, specs, specs[0])(pages, keys, values, places, layer, copies)  # type: ignore[no-any-return]
