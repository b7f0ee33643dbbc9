"""Attention of decode windows on TPUs: of each row's cache, the live blocks alone are read.

The stacked cache stays in main memory, whole: the layer and each row's length are known to the
kernel before it starts, and name the blocks that it fetches. What lies behind a row's length is
neither fetched nor computed, so rows of all lengths decode together at the cost of their own.

The paged kernels of JAX cannot stand here: `paged_attention` takes one query token a row, and
`ragged_paged_attention` wants keys and values interleaved in pages that hold the window
already, where ours stand apart and the window is uncommitted, behind a cache that is not paged.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from wedlm_jax.cache import LayerCache
from wedlm_jax.sharding import CACHE_AXES, on_own_shard

STEP_BYTES = 2**18
"""Keys that a step of the kernel fetches, about, and as many values: enough to outweigh what a
step costs by itself, little enough that a row's last block is not mostly dead."""
SMALLEST_BLOCK, LARGEST_BLOCK = 128, 1024
"""Rows of the cache in a block."""
SUBLANES = 16
"""Rows of a tile of bfloat16; those of float32 have half as many."""


def attend_ragged(
    q: Array,
    k: Array,
    v: Array,
    cache: LayerCache,
    lengths: Array,
    *,
    block: int | None = None,
    interpret: bool = False,
) -> Array:
    """Softmax attention of a window over each row's cache and over itself, causally.

    Args:
      q: ``[B, K, G, T, head_dim]``, grouped by KV head; T is a decode window's, or 1.
      k, v: ``[B, K, T, head_dim]``, the window's own.
      cache: of which all rows may be read, whatever its ``live``. S must be a multiple of 16.
      lengths: int32 ``[B]``, rows of the cache that are committed, at most S.
      block: rows of the cache that are fetched at once, a divisor of S; by default as many as
        `block_rows` says.
      interpret: run the kernel in Python on any device, for tests.

    Returns:
      ``[B, K, G, T, head_dim]`` in the dtype of ``q``.
    """
    own = partial(_attend_own, block=block, interpret=interpret)
    # The compiler does not cut a kernel: each device runs it on its own rows and heads.
    window = ("batch", "attention_heads")
    local = on_own_shard(own, [window, window, window, CACHE_AXES, CACHE_AXES, (), ("batch",)])
    return local(q, k, v, cache.keys, cache.values, cache.layer, lengths)


def block_rows(size: int, row_bytes: int) -> int:
    """Rows of a block of a cache of ``size`` rows, each of ``row_bytes``, all heads together.

    Raises:
      ValueError: S is not a multiple of 16.
    """
    if size % SUBLANES:
        raise ValueError(
            f"the ragged kernel needs a cache of a multiple of {SUBLANES} rows, not {size}"
        )
    wanted = SMALLEST_BLOCK
    while wanted < LARGEST_BLOCK and 2 * wanted * row_bytes <= STEP_BYTES:
        wanted *= 2
    return math.gcd(size, wanted)


def _attend_own(
    q: Array, k: Array, v: Array, keys: Array, values: Array, layer: Array, lengths: Array,
    *, block: int | None, interpret: bool,
) -> Array:  # fmt: skip
    """`attend_ragged` on one device's rows and heads."""
    batch, kv_heads, groups, window, head_dim = q.shape
    size = keys.shape[3]
    block = block or block_rows(size, kv_heads * head_dim * keys.dtype.itemsize)
    # Rows of one product: all heads of the first slot, then those of the second, and so on.
    queries = _pad_rows(q.swapaxes(2, 3).reshape(batch, kv_heads, window * groups, head_dim))
    k, v = _pad_rows(k), _pad_rows(v)

    def own(row: Array, step: Array, layer: Any, lengths: Any) -> tuple[Any, ...]:
        return row, 0, 0, 0

    def cached(row: Array, step: Array, layer: Any, lengths: Any) -> tuple[Any, ...]:
        # What is named twice running is fetched once: past its length a row stays at its last
        # block, and rows without any all name the same one.
        last = jnp.maximum(pl.cdiv(lengths[row], block) - 1, 0)
        return layer[0], jnp.where(lengths[row] > 0, row, 0), 0, jnp.minimum(step, last), 0

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), own)

    of_cache = pl.BlockSpec((None, 1, kv_heads, block, head_dim), cached)
    rows = queries.shape[2]
    out = pl.pallas_call(
        partial(_kernel, groups=groups, scale=head_dim**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # As many steps as the longest row needs; a shorter one idles through the rest.
            grid=(batch, jnp.maximum(pl.cdiv(lengths.max(), block), 1)),
            in_specs=[whole(queries), whole(k), whole(v), of_cache, of_cache],
            out_specs=whole(queries),
            scratch_shapes=[
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                pltpu.VMEM((kv_heads, rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(queries, k, keys),
        interpret=interpret,
        name="attend_ragged",
    )(layer.reshape(1), lengths, queries, k, v, keys, values)
    out = out[:, :, : window * groups].reshape(batch, kv_heads, window, groups, head_dim)
    return out.swapaxes(2, 3)


def _kernel(
    layer: Any, lengths: Any, q: Any, k: Any, v: Any, keys: Any, values: Any, out: Any,
    top: Any, total: Any, mixed: Any, *, groups: int, scale: float,
) -> None:  # fmt: skip
    """One block of one row's cache, all heads: a step of an online softmax.

    Args:
      layer, lengths: int32 ``[1]`` and ``[B]``.
      q, out: ``[1, K, T * G, head_dim]``, padded behind.
      k, v: ``[1, K, T, head_dim]``, padded behind.
      keys, values: ``[1, K, block, head_dim]``.
      top, total: float32 ``[K, T * G, 1]``, the largest score so far and the sum of the
        exponentials.
      mixed: float32 ``[K, T * G, head_dim]``, the values weighted by these.
      groups: G.
      scale: of the scores.
    """
    row, step = pl.program_id(0), pl.program_id(1)
    length, block = lengths[row], keys.shape[2]

    def add(k: Array, v: Array, visible: Array) -> None:
        scores = jnp.einsum("krh,knh->krn", q[0], k, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores * scale, -jnp.inf)
        new_top = jnp.maximum(top[...], scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        decay = jnp.exp(top[...] - new_top)
        top[...] = new_top
        total[...] = total[...] * decay + weights.sum(-1, keepdims=True)
        added = jnp.einsum(
            "krn,knh->krh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        mixed[...] = mixed[...] * decay + added

    @pl.when(step == 0)
    def _() -> None:
        top[...] = jnp.full(top.shape, -jnp.inf, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)
        # First the window itself: there every query sees something, so that the largest score
        # is finite from now on. Key t is seen from row t * G on; padding only by padding.
        shape = (1, q.shape[2], k.shape[2])
        query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
        add(k[0], v[0], key * groups <= query)

    @pl.when(step * block < length)
    def _() -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, (1, 1, block), 2) + step * block
        add(keys[0], values[0], place < length)

    @pl.when(step == pl.num_programs(1) - 1)
    def _() -> None:
        out[0] = (mixed[...] / total[...]).astype(out.dtype)


def _cost(queries: Array, k: Array, keys: Array) -> pl.CostEstimate:
    """What the compiler, which sees nothing of a kernel, is told: a cache that is full."""
    batch, kv_heads, rows, head_dim = queries.shape
    seen = keys.shape[3] + k.shape[2]
    pairs = batch * kv_heads * rows * seen
    fetched = 2 * batch * kv_heads * seen * head_dim * keys.dtype.itemsize
    return pl.CostEstimate(
        flops=4 * pairs * head_dim,
        transcendentals=pairs,
        bytes_accessed=fetched + 2 * queries.size * queries.dtype.itemsize,
    )


def _pad_rows(x: Array) -> Array:
    """``[B, K, N, head_dim]`` with zeros behind, up to whole tiles."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % SUBLANES), (0, 0)))
