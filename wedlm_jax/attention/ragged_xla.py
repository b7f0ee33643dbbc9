"""Ragged attention over pages in plain XLA, for any device: work grows with what is visible.

Spans are divided into *tiles* of a few tokens, and what a tile sees into *blocks* of places. An
outer loop goes over the tiles, an inner one over the blocks that a tile sees, with an online
softmax (Milakov & Gimelshein, 2018). No shape depends on a length, and a query always sums over the
blocks 0, 1, 2, … of its own sequence, so its result does not depend on the rest of the batch.

Tiles are computed several at a time, since one alone is too little work for a loop iteration. They
are sorted by how much they see; blocks that only a few of them see are computed one by one. Spans
of one token have tiles of their own; those of the others are about as long as the spans of a full
batch, because a short span in a long tile is mostly padding.

On a GPU each iteration of such a loop returns to the host, which takes longer than its work. There
all tiles are computed together, and the only loop goes over the blocks of the longest sequence.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.pages import Pages, Spans, to_float

BLOCK = 128
"""Approximate number of places per block."""
SHORTEST_TILE, TILE = 8, 32
"""Minimum and maximum tokens per tile, for spans of several tokens."""
AT_ONCE = 16
"""How many tiles are computed together."""
BLOCK_TOGETHER = 512
"""Approximate number of places per block where all tiles are computed together."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileList:
    """Tiles of one size, M of them, in groups of R.

    Attributes:
      sequence: int32 ``[M]``, the sequence of a tile.
      place: int32 ``[M]``, the place of its first token in the sequence.
      token: int32 ``[M]``, the index of that token among the flat tokens.
      count: int32 ``[M]``, how many tokens it has; 0 for an unused tile.
      blocks: int32 ``[M]``, how many blocks it sees.
      groups: int32, how many groups are in use.
      tile: tokens per tile, static.
      at_once: R, static.
      together: whether a single group computes every block for all tiles, static.
    """

    sequence: Array
    place: Array
    token: Array
    count: Array
    blocks: Array
    groups: Array
    tile: int = dataclasses.field(metadata={"static": True})
    at_once: int = dataclasses.field(metadata={"static": True})
    together: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """What attention computes once for all layers of a forward.

    Attributes:
      table: int32 ``[N, blocks * P]``, the page table, padded to whole blocks.
      single: tiles of the spans of one token; None if these are not treated separately.
      longer: tiles of the other spans; None if there are none.
      pages_per_block: P, static.
    """

    table: Array
    single: TileList | None
    longer: TileList | None
    pages_per_block: int = dataclasses.field(metadata={"static": True})


def make_tiles(
    spans: Spans,
    num_tokens: int,
    page_size: int,
    *,
    tile: int | None = None,
    block: int | None = None,
    deterministic: bool = False,
    together: bool = False,
) -> Tiles:
    """Returns the tiles of T flat tokens.

    Args:
      num_tokens: T.
      tile: tokens per tile; by default as many as a span has if all sequences have equal ones,
        within `SHORTEST_TILE` and `TILE`.
      block: approximate number of places per block.
      deterministic: compute every span in tiles of `TILE` tokens, one by one, whatever its length
        and the rest of the batch.
      together: compute all tiles of a kind together, for GPUs.
    """
    if block is None:
        block = BLOCK_TOGETHER if together else BLOCK
    sequences, columns = spans.page_table.shape
    pages_per_block = max(1, min(block // page_size, columns))
    table = jnp.pad(spans.page_table, ((0, 0), (0, -columns % pages_per_block)))
    places = pages_per_block * page_size
    lengths = spans.query_starts[1:] - spans.query_starts[:-1]
    if tile is None:
        each = 1 << (-(-num_tokens // sequences) - 1).bit_length()
        tile = TILE if deterministic else min(max(each, SHORTEST_TILE), TILE)
    tile = min(tile, num_tokens)

    def tile_list(parts: Array, most: int, tile: int, at_once: int = AT_ONCE) -> TileList:
        at_once = most if together else min(most, at_once)
        most = -(-most // at_once) * at_once
        return _tile_list(spans, parts, most, tile, places, at_once, together)

    single = longer = None
    apart = not deterministic and (num_tokens == 1 or sequences > 1)
    if apart:
        single = tile_list(jnp.where(lengths == 1, 1, 0), min(sequences, num_tokens), 1)
    if num_tokens > 1 or not apart:
        parts = -(-jnp.where(lengths > 1, lengths, 0 if apart else lengths) // tile)
        owners = min(sequences, num_tokens // 2 if apart else num_tokens)
        most = min(num_tokens, (num_tokens + owners * (tile - 1)) // tile)
        longer = tile_list(parts, most, tile, 1 if deterministic else AT_ONCE)
    return Tiles(table, single, longer, pages_per_block)


def _tile_list(
    spans: Spans, parts: Array, most: int, tile: int, block: int, at_once: int, together: bool
) -> TileList:
    """Lists the tiles of all spans.

    Args:
      parts: int32 ``[N]``, into how many tiles each span is divided.
      most: M.
    """
    starts = spans.query_starts
    ends = jnp.cumsum(parts)
    number = jnp.arange(most, dtype=jnp.int32)
    before = (number[:, None] >= ends[None, :]).sum(axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(before, spans.num_sequences - 1)
    offset = (number - (ends - parts)[sequence]) * tile
    length = (starts[1:] - starts[:-1])[sequence]
    count = jnp.where(before < spans.num_sequences, jnp.minimum(tile, length - offset), 0)
    real = count > 0
    place = jnp.where(real, spans.kv_lengths[sequence] - length + offset, 0)
    token = jnp.where(real, starts[sequence] + offset, 0)
    blocks = -(-jnp.where(real, place + count, 0) // block)
    groups = -(-ends[-1] // at_once)
    tiles = TileList(
        jnp.where(real, sequence, 0), place, token, count, blocks, groups, tile, at_once, together
    )
    if together or at_once == 1:
        return tiles
    order = jnp.argsort(-blocks, stable=True)
    return jax.tree.map(lambda x: x[order] if x.ndim else x, tiles)  # type: ignore[no-any-return]


def attend_xla(
    queries: Array, pages: Pages, tiles: Tiles, layer: Array | int, num_pages: int
) -> Array:
    """Computes `wedlm_jax.attention.ragged.attend_pages` in plain XLA, with `make_tiles`."""
    reader = _Reader(pages, tiles.table, layer * num_pages, tiles.pages_per_block)
    out = None
    for some in (tiles.longer, tiles.single):
        if some is not None:
            out = _attend_list(queries, reader, some, out)
    assert out is not None
    return out


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads blocks of places from the pages; `Tiles` describes the sizes."""

    pages: Pages
    table: Array
    first_page: Array | int
    pages_per_block: int

    @property
    def block(self) -> int:
        return self.pages_per_block * self.pages.shape[1]

    def read(self, sequence: Array, number: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Returns the keys and values, ``[R, K, block, head_dim]``, of block ``number`` of R
        sequences."""
        column = number * self.pages_per_block + jnp.arange(self.pages_per_block, dtype=jnp.int32)
        table = _at(self.table, sequence[:, None], column[None, :]) + self.first_page
        # Without the barrier XLA computes the index again for every element that is fetched.
        table = jax.lax.optimization_barrier(table)

        def of(pool: Array, kind: int) -> Array:
            # Heads are sharded over devices, so the key and value of a head must stay together.
            pairs = pool.reshape(*pool.shape[:2], pool.shape[2] // 2, 2, *pool.shape[3:])
            taken = _at(pairs[:, :, :, kind], table)
            return taken.reshape(table.shape[0], -1, *taken.shape[3:]).swapaxes(1, 2)

        keys, values = (jax.tree.map(partial(of, kind=kind), self.pages) for kind in (0, 1))
        return to_float(keys, dtype), to_float(values, dtype)


def _at(x: Array, *index: Array) -> Array:
    """Returns ``x[index]`` for indices that are known to be in range."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Sums:
    """The running sums of an online softmax over rows of queries, float32.

    Attributes:
      top: ``[R, K, M]``, the largest score so far.
      total: ``[R, K, M]``, the sum of exponentials.
      mixed: ``[R, K, M, head_dim]``, the sum of values weighted by the exponentials.
    """

    top: Array
    total: Array
    mixed: Array


def _attend_list(queries: Array, reader: _Reader, tiles: TileList, out: Array | None) -> Array:
    """Writes the attention of these tiles' tokens into ``out [T, H, head_dim]``."""
    size, heads, head_dim = queries.shape
    kv_heads = reader.pages.shape[2] // 2
    group, tile, at_once = heads // kv_heads, tiles.tile, tiles.at_once
    grouped = queries.reshape(size, kv_heads, group, head_dim)
    offset = jnp.arange(tile, dtype=jnp.int32)

    def of_group(number: Array | int) -> tuple[Array, Array]:
        """Returns the results of a group, ``[R * tile, H, head_dim]``, and the indices of their
        flat tokens, T for unused rows."""

        def take(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(
                x, number * at_once, at_once, allow_negative_indices=False
            )

        first, count = take(tiles.token)[:, None], take(tiles.count)[:, None]
        token = first + offset
        # The rows of a product are the heads of the first token, then those of the second, etc.
        q = _at(grouped, jnp.minimum(token, size - 1)).swapaxes(1, 2)
        q = q.reshape(at_once, kv_heads, tile * group, head_dim)
        place = jnp.repeat(take(tiles.place)[:, None] + offset, group, axis=1)
        of_tiles = take(tiles.sequence), place, take(tiles.blocks)
        mixed = _over_blocks(q, reader, *of_tiles, together=tiles.together)
        mixed = mixed.astype(queries.dtype).reshape(at_once, kv_heads, tile, group, head_dim)
        mixed = mixed.swapaxes(1, 2).reshape(at_once * tile, heads, head_dim)
        return mixed, jnp.where(offset < count, token, size).reshape(-1)

    if tiles.place.shape[0] == 1 and tile == size:
        return of_group(0)[0]

    def add(number: Array | int, out: Array) -> Array:
        mixed, token = of_group(number)
        return out.at[token].set(mixed, mode="drop")

    start = jnp.zeros_like(queries) if out is None else out
    if tiles.together:
        return add(0, start)
    return jax.lax.fori_loop(0, tiles.groups, add, start)  # type: ignore[no-any-return]


def _over_blocks(
    q: Array, reader: _Reader, sequence: Array, place: Array, blocks: Array, *, together: bool
) -> Array:
    """Computes the softmax over the blocks that some tiles see.

    Args:
      q: ``[R, K, M, head_dim]``.
      sequence: int32 ``[R]``.
      place: int32 ``[R, M]``, the place of each row of ``q``.
      blocks: int32 ``[R]``, how many blocks each tile sees; descending unless ``together``.

    Returns:
      float32 ``[R, K, M, head_dim]``; arbitrary for a tile without blocks.
    """
    many = q.shape[0]

    def add(number: Array | int, sums: _Sums) -> _Sums:
        return _add_block(q, reader, sequence, place, jnp.asarray(number, jnp.int32), sums)

    nothing = jnp.zeros(q.shape[:-1], jnp.float32)
    sums = _Sums(jnp.full_like(nothing, -jnp.inf), nothing, jnp.zeros(q.shape, jnp.float32))
    if reader.table.shape[1] == reader.pages_per_block:
        sums = add(0, sums)
        return sums.mixed / sums.total[..., None]
    # Blocks that at least half of the tiles see are computed for all; the rest one by one.
    joint = blocks.max() if together else blocks[many // 2]
    if many == 1:
        joint = jnp.maximum(joint, 1)  # an unused tile must not divide by zero
    sums = jax.lax.fori_loop(0, joint, add, sums)
    if many > 1 and not together:
        left = jnp.maximum(blocks - joint, 0)
        ends = jnp.cumsum(left)

        def add_one(item: Array, sums: _Sums) -> _Sums:
            at = (item >= ends).sum(dtype=jnp.int32)
            number = joint + item - (ends - left)[at]

            def take(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, at, 1, allow_negative_indices=False)

            def put(x: Array, part: Array) -> Array:
                return jax.lax.dynamic_update_slice_in_dim(
                    x, part, at, 0, allow_negative_indices=False
                )

            part = jax.tree.map(take, sums)
            part = _add_block(take(q), reader, take(sequence), take(place), number, part)
            return jax.tree.map(put, sums, part)  # type: ignore[no-any-return]

        sums = jax.lax.fori_loop(0, ends[-1], add_one, sums)
    return sums.mixed / sums.total[..., None]


def _add_block(
    q: Array, reader: _Reader, sequence: Array, place: Array, number: Array, sums: _Sums
) -> _Sums:
    keys, values = reader.read(sequence, number, q.dtype)
    scores = jnp.einsum("rkmh,rknh->rkmn", q, keys, preferred_element_type=jnp.float32)
    visible = number * reader.block + jnp.arange(reader.block) <= place[:, None, :, None]
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
    # Every row sees place 0, which is in the first block. So from then on its top is finite, and a
    # block that it does not see does not change a single bit.
    top = jnp.maximum(sums.top, scores.max(-1))
    weights = jnp.exp(scores - top[..., None])
    decay = jnp.exp(sums.top - top)
    added = jnp.einsum(
        "rkmn,rknh->rkmh", weights.astype(q.dtype), values, preferred_element_type=jnp.float32
    )
    total = sums.total * decay + weights.sum(-1)
    return _Sums(top, total, sums.mixed * decay[..., None] + added)
