"""Ragged attention over pages of keys and values.

All layers' pages lie in one array ``[layers * num_pages, page, 2 * K, head_dim]``, keys and values
of a head interleaved; layer l reads page numbers plus ``l * num_pages``. So no layer is ever cut
out of the pool, and it is updated in place through scans and loops. Page 0 of each layer belongs
to nobody: padding writes there.

A span's tokens see all places of their own sequence up to their own. In plain XLA they are
attended to in tiles of queries and blocks of places, by loops that end where the sequences do.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.int8 import Int8Rows, to_float, to_int8

Pages: TypeAlias = Array | Int8Rows

RAGGED_BACKENDS = ("xla", "rpa")
BLOCK = 256
"""Places that a tile looks at together."""
TILES_AT_ONCE = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spans:
    """The spans of one forward.

    Attributes:
      query_starts: int32 ``[N+1]``, flat places where each sequence's span starts.
      kv_lengths: int32 ``[N]``, places of each sequence, those of its span included; 0 without one.
      page_table: int32 ``[N, max_pages]``.
    """

    query_starts: Array
    kv_lengths: Array
    page_table: Array


def check_ragged_backend(
    name: str | None, platform: str, config: ModelConfig, *, int8: bool = False
) -> str:
    """The backend to use, ``name`` or the one for this platform."""
    if name is None:
        fits = platform == "tpu" and config.head_dim % 128 == 0 and not int8
        return "rpa" if fits else "xla"
    if name not in RAGGED_BACKENDS:
        raise InputError(f"attention: expected one of {', '.join(RAGGED_BACKENDS)}, not {name!r}")
    return name


def allocate_pages(
    config: ModelConfig, num_pages: int, page_size: int, dtype: Any, *, replicas: int = 1
) -> Pages:
    """Empty pages."""
    shape = (
        replicas * config.num_hidden_layers * num_pages,
        page_size,
        2 * config.num_key_value_heads,
        config.head_dim,
    )
    values = jnp.zeros(shape, dtype)
    return Int8Rows(values, jnp.zeros(shape[:-1])) if values.dtype == jnp.int8 else values


def _owner(starts: Array, size: int) -> tuple[Array, Array]:
    place = jnp.arange(size, dtype=jnp.int32)
    if starts.shape[0] == 2:
        return jnp.zeros_like(place), place
    sequence = (starts[1:-1][None, :] <= place[:, None]).sum(axis=1, dtype=jnp.int32)
    return sequence, place - starts[sequence]


def token_places(spans: Spans, size: int, page_size: int) -> Array:
    """int32 ``[T]``: where the keys and values of each flat token go, counted in tokens from the
    first page of a layer."""
    sequence, offset = _owner(spans.query_starts, size)
    lengths = spans.query_starts[1:] - spans.query_starts[:-1]
    place = spans.kv_lengths[sequence] - lengths[sequence] + offset
    real = jnp.arange(size) < spans.query_starts[-1]
    column = jnp.clip(place // page_size, 0, spans.page_table.shape[1] - 1)
    page = spans.page_table[sequence, column]
    return jnp.where(real, page * page_size + place % page_size, 0)


def write_pages(
    pages: Pages, keys: Array, values: Array, places: Array, layer: Any, num_pages: int
) -> Pages:
    """``pages`` with ``keys`` and ``values [T, K, head_dim]`` at ``places [T]`` of a layer."""
    both = jnp.stack([keys, values], axis=2)
    both = both.reshape(keys.shape[0], -1, keys.shape[-1])
    new: Any = to_int8(both) if isinstance(pages, Int8Rows) else both

    def put(old: Array, rows: Array) -> Array:
        page_size = old.shape[1]
        flat = old.reshape(-1, *old.shape[2:])
        at = places + layer * (num_pages * page_size)
        return flat.at[at].set(rows.astype(old.dtype)).reshape(old.shape)

    return jax.tree.map(put, pages, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of queries, those that see most first; M of them, static."""

    rows: Array
    places: Array
    sequence: Array
    blocks: Array
    groups: Array
    back: Array


def tile_size(size: int, sequences: int) -> int:
    """Queries of a tile."""
    if size <= sequences:
        return 1
    return min(8 if size <= 8 * sequences else 32, size)


def attention_plan(spans: Spans, size: int, page_size: int) -> Tiles:
    """What attention works out once for all layers."""
    count = spans.kv_lengths.shape[0]
    query = tile_size(size, count)
    most = -(-size // query) + (count - 1 if query > 1 else 0)
    most = -(-most // TILES_AT_ONCE) * TILES_AT_ONCE if most > TILES_AT_ONCE else most
    lengths = spans.query_starts[1:] - spans.query_starts[:-1]
    tiles = -(-lengths // query)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(tiles, dtype=jnp.int32)])
    sequence, tile = _owner(starts, most)
    real = jnp.arange(most) < starts[-1]
    first = spans.kv_lengths[sequence] - lengths[sequence] + tile * query
    inside = jnp.arange(query)
    left = lengths[sequence] - tile * query
    needed = jnp.where(real, first + jnp.minimum(left, query), 0)
    if most > TILES_AT_ONCE:
        order = jnp.argsort(-needed, stable=True)
        rank = jnp.argsort(order)
    else:
        order = rank = jnp.arange(most)
    rows = spans.query_starts[sequence] + tile * query
    own, offset = _owner(spans.query_starts, size)
    at = rank[jnp.minimum(starts[own] + offset // query, most - 1)] * query + offset % query
    rows = jnp.minimum(rows[order, None] + inside, size - 1)
    blocks = -(-needed[order] // BLOCK)
    return Tiles(
        rows=rows,
        places=first[order, None] + inside,
        sequence=sequence[order],
        blocks=blocks,
        groups=-(-starts[-1] // min(most, TILES_AT_ONCE)),
        back=at,
    )


def attend_pages(
    queries: Array,
    pages: Pages,
    spans: Spans,
    plan: Tiles,
    layer: Any,
    num_pages: int,
    *,
    implementation: str = "xla",
) -> Array:
    """What ``queries [T, H, head_dim]`` attend to, in their dtype and shape."""
    heads, size = queries.shape[1:]
    kv_heads = pages.shape[2] // 2
    group = heads // kv_heads
    tiles, query = plan.rows.shape
    tiled = queries[plan.rows].reshape(tiles, query, kv_heads, group, size)
    tiled = (tiled.astype(jnp.float32) * size**-0.5).astype(queries.dtype)
    tiled = tiled.transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, query * group, size)
    places = jnp.repeat(plan.places, group, axis=1)
    at_once = min(tiles, TILES_AT_ONCE)
    table = spans.page_table + layer * num_pages
    per_block = max(BLOCK // pages.shape[1], 1)
    columns = -(-table.shape[1] // per_block) * per_block
    table = jnp.pad(table, ((0, 0), (0, columns - table.shape[1])))

    def one_group(start: Array) -> Array:
        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, at_once)

        q, own_places, sequence, blocks = map(cut, (tiled, places, plan.sequence, plan.blocks))
        own_table = table[sequence]
        statistics = (*q.shape[:3], 1)

        def block(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            number, top, total, out = carry
            columns = jax.lax.dynamic_slice_in_dim(own_table, number * per_block, per_block, axis=1)
            keys, values = _of_pages(pages, columns, q.dtype)
            scores = jnp.einsum("rkqh,rskh->rkqs", q, keys, preferred_element_type=jnp.float32)
            place = number * per_block * pages.shape[1] + jnp.arange(keys.shape[1])
            seen = place <= own_places[:, None, :, None]
            scores = jnp.where(seen, scores, -1e30)
            new_top = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
            scale = jnp.exp(top - new_top)
            new = jnp.einsum(
                "rkqs,rskh->rkqh",
                weights.astype(q.dtype),
                values,
                preferred_element_type=jnp.float32,
            )
            total = total * scale + weights.sum(axis=-1, keepdims=True)
            return number + 1, new_top, total, out * scale + new

        most = blocks.max()
        start_carry = (
            jnp.int32(0),
            jnp.full(statistics, -1e30),
            jnp.zeros(statistics),
            jnp.zeros(q.shape, jnp.float32),
        )
        _, _, total, out = jax.lax.while_loop(lambda c: c[0] < most, block, start_carry)
        return (out / jnp.maximum(total, 1e-30)).astype(queries.dtype)

    if tiles == at_once:
        out = one_group(jnp.int32(0))
    else:

        def group_step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            number, out = carry
            start = number * at_once
            return number + 1, jax.lax.dynamic_update_slice_in_dim(
                out, one_group(start), start, axis=0
            )

        empty = jnp.zeros(tiled.shape, queries.dtype)
        _, out = jax.lax.while_loop(lambda c: c[0] < plan.groups, group_step, (jnp.int32(0), empty))
    out = out.reshape(tiles, kv_heads, query, group, size).transpose(0, 2, 1, 3, 4)
    return out.reshape(tiles * query, heads, size)[plan.back]


def _of_pages(pages: Pages, columns: Array, dtype: Any) -> tuple[Array, Array]:
    found = to_float(jax.tree.map(lambda x: x[columns], pages), dtype)
    rows, count, size = found.shape[:3]
    found = found.reshape(rows, count * size, -1, 2, found.shape[-1])
    return found[:, :, :, 0], found[:, :, :, 1]
