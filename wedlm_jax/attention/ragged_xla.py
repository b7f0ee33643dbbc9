"""Ragged attention over pages in plain XLA, for any device: work follows what is visible.

Spans are cut into *tiles* of a few tokens. A loop takes a few tiles at a time, longest first,
so that those together need about the same; a loop within it goes over *blocks* of places with
an online softmax (Milakov & Gimelshein, 2018) for as long as the longest of them needs. No shape
depends on a length, and a query always sums over the blocks 0, 1, 2, … of its own sequence.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.pages import Pages, Spans
from wedlm_jax.int8 import Int8Rows

BLOCK = 256
"""Places of a block, about."""
LARGEST_TILE = 32
"""Tokens of a tile, at most."""
SMALLEST_TILE = 8
"""Likewise at least, where spans may have more than one token."""
TILES_AT_ONCE = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of a forward, the same for all its layers. M tiles, P pages in a block.

    Attributes:
      pages: int32 ``[M, blocks * P]``, pages of each tile's sequence; 0 behind the last.
      place: int32 ``[M]``, where in its sequence a tile's first token stands.
      token: int32 ``[M]``, where among the flat tokens.
      blocks: int32 ``[M]``, how many blocks the tile sees. Descending; 0 for a tile that is none.
      slot: int32 ``[T]``, where in ``[M * tile]`` each flat token stands.
      tile: tokens of a tile, static.
      pages_per_block: P, static.
    """

    pages: Array
    place: Array
    token: Array
    blocks: Array
    slot: Array
    tile: int = dataclasses.field(metadata={"static": True})
    pages_per_block: int = dataclasses.field(metadata={"static": True})


def tile_size(num_tokens: int, num_sequences: int) -> int:
    """Returns how many tokens a tile has where T flat tokens belong to N sequences."""
    if num_tokens <= num_sequences:
        return 1
    each = -(-num_tokens // num_sequences)
    return min(num_tokens, max(SMALLEST_TILE, min(each, LARGEST_TILE)))


def make_tiles(spans: Spans, num_tokens: int, page_size: int, *, tile: int | None = None) -> Tiles:
    """Returns the tiles of T flat tokens.

    Args:
      spans: of this forward.
      num_tokens: T.
      page_size: tokens of a page.
      tile: tokens of a tile; by default from T and N.
    """
    count = spans.num_sequences
    tile = tile_size(num_tokens, count) if tile is None else min(tile, num_tokens)
    most = min(num_tokens, (num_tokens + count * (tile - 1)) // tile)
    starts = spans.query_starts
    lengths = starts[1:] - starts[:-1]
    ends = jnp.cumsum(-(-lengths // tile))
    number = jnp.arange(most, dtype=jnp.int32)
    before = (number[:, None] >= ends[None, :]).sum(axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(before, count - 1)
    first = ends[sequence] - (-(-lengths[sequence] // tile))
    offset = (number - first) * tile
    real = before < count
    place = jnp.where(real, spans.kv_lengths[sequence] - lengths[sequence] + offset, 0)
    last = place + jnp.minimum(tile, lengths[sequence] - offset)
    pages_per_block = max(1, min(BLOCK // page_size, spans.page_table.shape[1]))
    blocks = jnp.where(real, -(-last // (pages_per_block * page_size)), 0)
    order = jnp.argsort(-blocks, stable=True)
    rank = jnp.argsort(order)
    table = spans.page_table
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_per_block)))
    owner, _, is_real = spans.owners(num_tokens)
    within = jnp.arange(num_tokens, dtype=jnp.int32) - starts[owner]
    its_tile = ends[owner] - (-(-lengths[owner] // tile)) + within // tile
    slot = rank[jnp.clip(its_tile, 0, most - 1)] * tile + within % tile
    return Tiles(
        pages=table[sequence[order]],
        place=place[order],
        token=jnp.where(real, starts[sequence] + offset, 0)[order],
        blocks=blocks[order],
        slot=jnp.where(is_real, slot, 0).astype(jnp.int32),
        tile=tile,
        pages_per_block=pages_per_block,
    )


def attend_xla(
    queries: Array, pages: Pages, tiles: Tiles, layer: Array | int, num_pages: int, scale: float
) -> Array:
    """Causal attention of flat tokens over their sequences' pages; see `attend_pages`.

    Args:
      queries: ``[T, H, head_dim]``.
      pages: the pool, with keys and values of these tokens.
      tiles: from `make_tiles`.
      layer: whose pages, from 0.
      num_pages: of each layer.
      scale: of the scores.
    """
    size, heads, head_dim = queries.shape
    kv_heads = pages.shape[2] // 2
    group = heads // kv_heads
    most, tile = tiles.place.shape[0], tiles.tile
    at_once = min(TILES_AT_ONCE, most)
    tiles = _padded(tiles, -most % at_once)
    first_page = layer * num_pages
    grouped = queries.reshape(size, kv_heads, group, head_dim)
    offset = jnp.arange(tile, dtype=jnp.int32)

    def some(start: Array | int, out: Array) -> Array:
        def take(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, at_once)

        token = jnp.minimum(take(tiles.token)[:, None] + offset, size - 1)
        place = jnp.repeat(take(tiles.place)[:, None] + offset, group, axis=1)
        # Rows of a product: the heads of the first token, those of the second, and so on.
        q = grouped[token].swapaxes(1, 2).reshape(at_once, kv_heads, tile * group, head_dim)
        mixed = _over_blocks(
            q, pages, take(tiles.pages) + first_page, place, take(tiles.blocks)[0], tiles, scale
        )
        mixed = mixed.astype(queries.dtype).reshape(at_once, kv_heads, tile, group, head_dim)
        mixed = mixed.swapaxes(1, 2).reshape(at_once * tile, heads, head_dim)
        return jax.lax.dynamic_update_slice_in_dim(out, mixed, start * tile, axis=0)

    out = jnp.zeros((tiles.place.shape[0] * tile, heads, head_dim), queries.dtype)
    if at_once == most:
        out = some(0, out)
    else:
        groups = (tiles.blocks.reshape(-1, at_once)[:, 0] > 0).sum()
        out = jax.lax.fori_loop(0, groups, lambda i, out: some(i * at_once, out), out)
    return out[tiles.slot]


def _padded(tiles: Tiles, more: int) -> Tiles:
    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)))

    own = {name: pad(getattr(tiles, name)) for name in ("pages", "place", "token", "blocks")}
    return dataclasses.replace(tiles, **own)  # type: ignore[arg-type]


def _over_blocks(
    q: Array, pages: Pages, table: Array, place: Array, blocks: Array, tiles: Tiles, scale: float
) -> Array:
    """Softmax over the blocks that some tiles see.

    Args:
      q: ``[R, K, M, head_dim]``.
      table: int32 ``[R, blocks * P]``, of pages in the pool.
      place: int32 ``[R, M]``, of each row of ``q``.
      blocks: how many at most.

    Returns:
      float32 ``[R, K, M, head_dim]``.
    """
    pages_per_block = tiles.pages_per_block
    block = pages_per_block * pages.shape[1]
    within = jnp.arange(block, dtype=jnp.int32)

    def add(i: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = carry
        some = jax.lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block, axis=1)
        keys, values = _gather(pages, some, q.dtype)
        scores = jnp.einsum("rkmh,rkhn->rkmn", q, keys, preferred_element_type=jnp.float32)
        visible = i * block + within <= place[:, None, :, None]
        scores = jnp.where(visible, scores * scale, -jnp.inf)
        # Every row sees place 0, in the first block: from there on the top is finite, and a block
        # of which nothing is visible changes nothing, to the bit.
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        added = jnp.einsum(
            "rkmn,rknh->rkmh", weights.astype(q.dtype), values, preferred_element_type=jnp.float32
        )
        return new_top, total * decay + weights.sum(-1), mixed * decay[..., None] + added

    rows = q.shape[:-1]
    start = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    # One block at least: padding must not divide by zero.
    _, total, mixed = jax.lax.fori_loop(0, jnp.maximum(blocks, 1), add, start)
    return mixed / total[..., None]


def _gather(pages: Pages, table: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Returns keys ``[R, K, head_dim, N]`` and values ``[R, K, N, head_dim]`` of the pages
    ``table [R, P]``. On a CPU products with transposed keys are up to five times faster."""

    def of(pool: Array, kind: int) -> Array:
        # Heads are cut over devices: the pair of a head must not be.
        pairs = pool.reshape(*pool.shape[:2], pool.shape[2] // 2, 2, *pool.shape[3:])
        taken = pairs.at[table, :, :, kind].get(mode="promise_in_bounds")
        taken = taken.reshape(table.shape[0], -1, *taken.shape[3:])
        return taken.swapaxes(1, 2)

    if not isinstance(pages, Int8Rows):
        return of(pages, 0).swapaxes(2, 3), of(pages, 1)
    keys, values = (
        of(pages.values, kind).astype(jnp.float32) * of(pages.scales, kind)[..., None]
        for kind in (0, 1)
    )
    return keys.astype(dtype).swapaxes(2, 3), values.astype(dtype)
