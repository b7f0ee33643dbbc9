"""Attention of decode windows on NVIDIA GPUs: of each row's cache, the live blocks alone are read.

What `wedlm_jax.attention.ragged` does for TPUs, by a Pallas kernel that Triton compiles. A window
has few queries and a GPU many processors, so the blocks of a row are shared out among several
programs, whose partial sums are put together afterwards (flash decoding; Dao et al., 2023). The
stacked cache stays where it is: a program reads the layer and its row's length, and from there the
blocks below it.

Why not a library's: `jax.nn.dot_product_attention` takes a length a row, but the keys of one layer
in one array, window included: the layer would have to be cut out of the stack and the window
written before it is known what of it stays. `jax.experimental.pallas.ops.gpu.decode_attention`
takes one query token a row.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

from wedlm_jax.attention.triton import MIN_SIDE, products_precision
from wedlm_jax.attention.triton_kernels import product
from wedlm_jax.cache import LayerCache
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import CACHE_AXES, on_own_shard

HEAD_DIMS = (16, 32, 64, 128)
LARGEST_TILE = 128
"""Queries of one program: slots times the query heads of a KV head."""
BLOCK = 64
"""Rows of the cache that a program fetches at once, where they divide it."""
PROGRAMS = 264
"""As many are wanted at least: two for each processor of an H200. Not timed."""
BLOCKS_A_SHARE = 4
"""Blocks of a row that are worth a program of their own, at least, where the cache is full."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is static in a call.

    Attributes:
      groups: query heads of a KV head.
      tile: queries of a program.
      block: rows of the cache of a step.
      shares: programs among which a row's blocks are shared out.
      scale: from scores to exponents of 2.
      precision: of products.
    """

    groups: int
    tile: int
    block: int
    shares: int
    scale: float
    precision: Any


def attend_ragged_triton(
    q: Array,
    k: Array,
    v: Array,
    cache: LayerCache,
    lengths: Array,
    *,
    block: int | None = None,
    shares: int | None = None,
    interpret: bool = False,
) -> Array:
    """Softmax attention of a window over each row's cache and over itself, causally.

    Args:
      q: ``[B, K, G, T, head_dim]``, grouped by KV head; T is a decode window's, or 1.
      k, v: ``[B, K, T, head_dim]``, the window's own.
      cache: of which all rows may be read, whatever its ``live``. S must be a multiple of 16.
      lengths: int32 ``[B]``, rows of the cache that are committed, at most S.
      block: rows of the cache that are fetched at once, at most; by default as many as a
        processor's memory holds.
      shares: programs that share a row's blocks; by default as many as fill a GPU.
      interpret: run the kernel in Python on any device, for tests.

    Returns:
      ``[B, K, G, T, head_dim]`` in the dtype of ``q``.

    Raises:
      InputError: a width of heads that is not in `HEAD_DIMS`.
    """
    check_heads(q.shape[-1])
    own = partial(_attend_own, block=block, shares=shares, interpret=interpret)
    # The compiler does not cut a kernel: each device runs it on its own rows and heads.
    window = ("batch", "attention_heads")
    local = on_own_shard(own, [window, window, window, CACHE_AXES, CACHE_AXES, (), ("batch",)])
    return local(q, k, v, cache.keys, cache.values, cache.layer, lengths)


def check_heads(head_dim: int) -> None:
    """Refuses heads that no tile fits.

    Raises:
      InputError: a width that is not in `HEAD_DIMS`.
    """
    if head_dim not in HEAD_DIMS:
        raise InputError(
            "attention implementation 'ragged_triton' takes heads of "
            f"{', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        )


def _attend_own(
    q: Array, k: Array, v: Array, keys: Array, values: Array, layer: Array, lengths: Array,
    *, block: int | None, shares: int | None, interpret: bool,
) -> Array:  # fmt: skip
    """`attend_ragged_triton` on one device's rows and heads."""
    batch, kv_heads, groups, window, width = q.shape
    size = keys.shape[3]
    if size % MIN_SIDE:
        raise ValueError(
            f"the ragged kernel needs a cache of a multiple of {MIN_SIDE} rows, not {size}"
        )
    # Float32, which is for comparisons, has twice the bytes and products of three passes.
    half = q.dtype.itemsize <= 2
    block = math.gcd(size, block or (BLOCK if half else BLOCK // 2))
    # Rows of one product: all heads of the first slot, then those of the second, and so on.
    most = LARGEST_TILE if half else LARGEST_TILE // 4
    tile = min(max(pl.next_power_of_2(window * groups), MIN_SIDE), most)
    queries = _pad_rows(q.swapaxes(2, 3).reshape(batch, kv_heads, window * groups, width), tile)
    k, v = (_pad_rows(x, max(pl.next_power_of_2(window), MIN_SIDE)) for x in (k, v))
    tiles = queries.shape[2] // tile
    plan = Plan(
        groups, tile, block, shares or _shares(batch * kv_heads * tiles, size // block),
        width**-0.5 * math.log2(math.e), products_precision(q.dtype, interpret),
    )  # fmt: skip

    def row(program: Array) -> Array:
        return jax.lax.div(program, plan.shares)

    def share(program: Array) -> tuple[Array, Array]:
        return row(program), jax.lax.rem(program, plan.shares)

    window_keys = pl.BlockSpec((None, None, *k.shape[2:]), lambda i, h, b: (row(b), h, 0, 0))
    cached = pl.BlockSpec(
        (keys.shape[0], None, None, size, width), lambda i, h, b: (0, row(b), h, 0, 0)
    )
    of_share = pl.BlockSpec((None, None, None, tile), lambda i, h, b: (*share(b), h, i))
    mixed, top, total = pl.pallas_call(
        partial(_kernel, plan=plan),
        grid=(tiles, kv_heads, batch * plan.shares),
        in_specs=[
            pl.BlockSpec((1,), lambda i, h, b: (0,)),
            pl.BlockSpec((1,), lambda i, h, b: (row(b),)),
            pl.BlockSpec((None, None, tile, width), lambda i, h, b: (row(b), h, i, 0)),
            window_keys, window_keys, cached, cached,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, tile, width), lambda i, h, b: (*share(b), h, i, 0)),
            of_share, of_share,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, plan.shares, *queries.shape[1:]), jnp.float32),
            *[jax.ShapeDtypeStruct((batch, plan.shares, *queries.shape[1:3]), jnp.float32)] * 2,
        ],
        compiler_params=backend.CompilerParams(
            num_warps=8 if tile > 64 or not half else 4, num_stages=3 if half else 2
        ),
        interpret=interpret,
        name="attend_ragged",
    )(layer.reshape(1), lengths, queries, k, v, keys, values)  # fmt: skip
    out = _together(mixed, top, total).astype(q.dtype)[:, :, : window * groups]
    return out.reshape(batch, kv_heads, window, groups, width).swapaxes(2, 3)


def _shares(programs: int, blocks: int) -> int:
    """Shares of a row, where so many programs would do without."""
    return max(min(-(-PROGRAMS // programs), blocks // BLOCKS_A_SHARE), 1)


def _kernel(
    layer: Any, length: Any, q: Any, k: Any, v: Any, keys: Any, values: Any,
    mixed: Any, top: Any, total: Any, *, plan: Plan,
) -> None:  # fmt: skip
    """A share of one row's cache, for a tile of the queries of one KV head.

    Args:
      layer, length: int32 ``[1]``.
      q: ``[tile, head_dim]``.
      k, v: ``[T, head_dim]``, the window's own, padded behind.
      keys, values: ``[num_hidden_layers, S, head_dim]``.
      mixed: float32 ``[tile, head_dim]``, the values weighted by the exponentials.
      top, total: float32 ``[tile]``, the largest exponent, and the sum of the exponentials
        beside it. A share that sees nothing has a total of 0.
    """
    first, share = pl.program_id(0) * plan.tile, jax.lax.rem(pl.program_id(2), plan.shares)
    queries, at, end = q[...], layer[0], length[0]

    def add(carry: tuple[Array, ...], k: Array, v: Array, visible: Array) -> tuple[Array, ...]:
        top, total, mixed = carry
        scores = product(queries, k, (1, 1), plan.precision) * plan.scale
        scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        # What has seen nothing yet has no finite top: nothing to subtract.
        shift = jnp.where(new_top > -jnp.inf, new_top, 0.0)
        weights, decay = jnp.exp2(scores - shift[:, None]), jnp.exp2(top - shift)
        new = product(weights.astype(v.dtype), v, (1, 0), plan.precision)
        return new_top, total * decay + weights.sum(-1), mixed * decay[:, None] + new

    def own(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        # Key t is seen from query t * G on; padding only by padding.
        query = first + jnp.arange(plan.tile)
        seen = (jnp.arange(k.shape[0]) * plan.groups)[None, :] <= query[:, None]
        return add(carry, k[...], v[...], seen)

    def before(step: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        rows = pl.ds(step * plan.block, plan.block)
        place = step * plan.block + jnp.arange(plan.block)
        return add(carry, keys[at, rows, :], values[at, rows, :], (place < end)[None, :])

    carry: tuple[Array, ...] = (
        jnp.full(plan.tile, -jnp.inf, jnp.float32),
        jnp.zeros(plan.tile, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    blocks = pl.cdiv(end, plan.block)
    each = pl.cdiv(blocks, plan.shares)
    carry = jax.lax.fori_loop(0, jnp.maximum(1 - share, 0), own, carry)
    last = jnp.minimum((share + 1) * each, blocks)
    top[...], total[...], mixed[...] = jax.lax.fori_loop(share * each, last, before, carry)


def _together(mixed: Array, top: Array, total: Array) -> Array:
    """float32 ``[B, K, R, head_dim]`` of the shares, axis 1, whose first has seen something."""
    weights = jnp.exp2(top - top.max(axis=1, keepdims=True))
    return (mixed * weights[..., None]).sum(1) / (total * weights).sum(1)[..., None]


def _pad_rows(x: Array, multiple: int) -> Array:
    """``[B, K, N, head_dim]`` with zeros behind, up to a multiple."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % multiple), (0, 0)))
