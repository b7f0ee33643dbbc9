"""The three kernels of `wedlm_jax.attention.triton`, each for one tile of one head.

Scores are float32, like all sums, and scaled within the exponent of 2, which the hardware has:
``exp2(score * scale - shift)`` leaves a compiler one multiply-add a pair. Tiles are
``[queries, keys]`` in the first two kernels and ``[keys, queries]`` in the third, whose products
then take every operand as it lies.

References hold, T being the rows of all streams and G the query heads of one KV head:
``runs [streams, 2]``, ``segments [T]``, ``q, out, d_out [tile, head_dim]`` or
``[G, T, head_dim]``, ``k, v [T, head_dim]`` or ``[tile, head_dim]``, ``log_total, mean [tile]``
or ``[G, T]``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from wedlm_jax.attention.runs import StreamLayout
from wedlm_jax.masks import PAD_SEGMENT

UNSEEN_SEGMENT = -1
"""What padding is called on the side of the queries: no key has it."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one kernel is cut: powers of two.

    Attributes:
      queries, keys: rows of a tile of each.
      warps: of 32 threads, for one tile.
      stages: loads in flight.
    """

    queries: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static in a call.

    Attributes:
      layout: the mask's static part.
      scale: of scores, before the softmax.
      precision: of products.
      forward, by_query, by_key: tiles of the output's kernel, of the queries' gradient, and of
        the keys' and values'.
      interpret: run the kernels in Python on any device.
    """

    layout: StreamLayout
    scale: float
    precision: Any
    forward: Tiles
    by_query: Tiles
    by_key: Tiles
    interpret: bool


def forward_kernel(
    runs: Any, segments: Any, q: Any, k: Any, v: Any, out: Any, log_total: Any, *, plan: Plan
) -> None:
    """The output of a tile of queries, and each row's log2 of the sum of exponentials."""
    tiles, scale = plan.forward, _log2_scale(plan)
    q_tile = q[...]
    view = _QueryTile(plan, tiles, segments)

    def visit(own: bool) -> Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]:
        def body(j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            top, total, mixed = carry
            keys = pl.ds(j * tiles.keys, tiles.keys)
            scores = product(q_tile, k[keys, :], (1, 1), plan.precision)
            scores = jnp.where(view.seen(j, own), scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            # A row that has seen nothing yet has no finite top: nothing to subtract.
            shift = jnp.where(new_top > -jnp.inf, new_top * scale, 0.0)
            weights = jnp.exp2(scores * scale - shift[:, None])
            decay = jnp.exp2(top * scale - shift)
            total = total * decay + weights.sum(-1)
            new = product(weights.astype(v.dtype), v[keys, :], (1, 0), plan.precision)
            return new_top, total, mixed * decay[:, None] + new

        return body

    start = (
        jnp.full(tiles.queries, -jnp.inf, jnp.float32),
        jnp.zeros(tiles.queries, jnp.float32),
        jnp.zeros(q_tile.shape, jnp.float32),
    )
    top, total, mixed = _walk(runs, visit, start, plan)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out[...] = (mixed / total[:, None]).astype(out.dtype)
    log_total[...] = jnp.where(seen, top * scale + jnp.log2(total), 0.0)


def query_gradient_kernel(
    runs: Any, segments: Any, q: Any, k: Any, v: Any, d_out: Any, log_total: Any, mean: Any,
    d_q: Any, *, plan: Plan,
) -> None:  # fmt: skip
    """The gradient of a tile of queries."""
    tiles, scale = plan.by_query, _log2_scale(plan)
    q_tile, d_tile, log_tile, mean_tile = q[...], d_out[...], log_total[...], mean[...]
    view = _QueryTile(plan, tiles, segments)

    def visit(own: bool) -> Callable[[Array, Array], Array]:
        def body(j: Array, total: Array) -> Array:
            keys = pl.ds(j * tiles.keys, tiles.keys)
            k_tile = k[keys, :]
            exponents = product(q_tile, k_tile, (1, 1), plan.precision) * scale - log_tile[:, None]
            weights = jnp.exp2(jnp.where(view.seen(j, own), exponents, -jnp.inf))
            d_weights = product(d_tile, v[keys, :], (1, 1), plan.precision)
            d_scores = weights * (d_weights - mean_tile[:, None])
            return total + product(d_scores.astype(k.dtype), k_tile, (1, 0), plan.precision)

        return body

    total = _walk(runs, visit, jnp.zeros(q_tile.shape, jnp.float32), plan)
    d_q[...] = (total * plan.scale).astype(d_q.dtype)


def key_gradient_kernel(
    runs: Any, segments: Any, q: Any, k: Any, v: Any, d_out: Any, log_total: Any, mean: Any,
    d_k: Any, d_v: Any, *, plan: Plan,
) -> None:  # fmt: skip
    """The gradients of a tile of keys and values, summed over the query heads they serve."""
    tiles, layout, scale = plan.by_key, plan.layout, _log2_scale(plan)
    k_tile, v_tile = k[...], v[...]
    first_key = pl.program_id(0) * tiles.keys
    key = (first_key + jnp.arange(tiles.keys))[:, None]
    key_segments = segments[pl.ds(first_key, tiles.keys)][:, None]

    def visit(head: Array, query_own: bool, key_own: bool) -> Callable:
        def body(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            total_k, total_v = carry
            queries = pl.ds(i * tiles.queries, tiles.queries)
            q_tile, d_tile = q[head, queries, :], d_out[head, queries, :]
            rows = i * tiles.queries + jnp.arange(tiles.queries)
            first, last = layout.key_bounds(rows, query_own, key_own)
            seen = (_as_queries(segments[queries])[None, :] == key_segments) & (
                key <= last[None, :]
            )
            if first is not None:
                seen &= key >= first[None, :]
            log_tile, mean_tile = log_total[head, queries][None, :], mean[head, queries][None, :]
            exponents = product(k_tile, q_tile, (1, 1), plan.precision) * scale - log_tile
            weights = jnp.exp2(jnp.where(seen, exponents, -jnp.inf))
            total_v += product(weights.astype(v.dtype), d_tile, (1, 0), plan.precision)
            d_scores = weights * (product(v_tile, d_tile, (1, 1), plan.precision) - mean_tile)
            total_k += product(d_scores.astype(q.dtype), q_tile, (1, 0), plan.precision)
            return total_k, total_v

        return body

    def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        begin, end = runs[0, 0], runs[0, 1]
        carry = jax.lax.fori_loop(begin, end, visit(head, False, False), carry)
        if layout.streams == 1:
            return carry
        # Queries of the prediction stream see keys of either, and by other rules.
        begin, end, own = runs[1, 0], runs[1, 1], first_key >= layout.length
        middle = jnp.where(own, begin, end)
        carry = jax.lax.fori_loop(begin, middle, visit(head, True, False), carry)
        return jax.lax.fori_loop(middle, end, visit(head, True, True), carry)

    zeros = jnp.zeros(k_tile.shape, jnp.float32)
    total_k, total_v = jax.lax.fori_loop(0, q.shape[0], of_head, (zeros, zeros))
    d_k[...] = (total_k * plan.scale).astype(d_k.dtype)
    d_v[...] = total_v.astype(d_v.dtype)


class _QueryTile:
    """What the rows of this program's tile of queries see."""

    def __init__(self, plan: Plan, tiles: Tiles, segments: Any):
        self._layout, self._keys, self._segments = plan.layout, tiles.keys, segments
        first = query_tile_of(pl.program_id(0), plan.layout, tiles) * tiles.queries
        self._own = False if plan.layout.streams == 1 else first >= plan.layout.length
        self._rows = first + jnp.arange(tiles.queries)
        self._query_segments = _as_queries(segments[pl.ds(first, tiles.queries)])

    def seen(self, j: Array, key_own: bool) -> Array:
        """bool ``[queries, keys]``: the mask within the tile of this program and the keys j."""
        first, last = self._layout.key_bounds(self._rows, self._own, key_own)
        key = (j * self._keys + jnp.arange(self._keys))[None, :]
        key_segments = self._segments[pl.ds(j * self._keys, self._keys)][None, :]
        seen = (self._query_segments[:, None] == key_segments) & (key <= last[:, None])
        return seen if first is None else seen & (key >= first[:, None])


def query_tile_of(program: Array, layout: StreamLayout, tiles: Tiles) -> Array:
    """Late tiles see most: they come first, lest one of them be left alone at the end."""
    return layout.streams * layout.length // tiles.queries - 1 - program


def _walk(runs: Any, visit: Callable[[bool], Callable], carry: Any, plan: Plan) -> Any:
    """``carry`` after the visible tiles of the memory's keys, then of the prediction's."""
    for stream in range(plan.layout.streams):
        begin, end = runs[stream, 0], runs[stream, 1]
        carry = jax.lax.fori_loop(begin, end, visit(stream == 1), carry)
    return carry


def _as_queries(segments: Array) -> Array:
    return jnp.where(segments == PAD_SEGMENT, UNSEEN_SEGMENT, segments)


def _log2_scale(plan: Plan) -> float:
    """From scores to exponents of 2."""
    return plan.scale * math.log2(math.e)


def product(x: Array, y: Array, contracted: tuple[int, int], precision: Any) -> Array:
    """float32 product over these axes of two matrices."""
    axes = ((contracted[0],), (contracted[1],))
    return jax.lax.dot_general(
        x, y, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
