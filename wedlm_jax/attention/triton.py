"""Attention on NVIDIA GPUs by Pallas kernels that Triton compiles: visible tiles only.

An online softmax forward and two kernels backward (Dao, 2023, algorithms 1 and 2), of which one
gives the queries' gradient, the other that of keys and values. Each walks the runs of visible
tiles (`wedlm_jax.attention.runs`), segments included. Query heads read the keys and values of
their KV head where they lie, and their shares of its gradient are summed in registers.

Why not a library's: `jax.nn.dot_product_attention` and tokamax take causal masks, windows and
lengths, or one run of keys a query; a query of the prediction stream sees two runs (earlier
blocks of the memory, its own block), which they take only as a ``[2L, 2L]`` array, visited
whole. `jax.experimental.pallas.ops.gpu.attention` is causal with segments, and deprecated.

JAX 0.12 deprecates the backend itself (Pallas for Triton) without naming the version that will
be without it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as backend

from wedlm_jax.attention.padding import pad_streams, stream_layout, stream_segments, trim_streams
from wedlm_jax.attention.runs import StreamLayout, runs, visible_tiles
from wedlm_jax.attention.triton_kernels import (
    Plan,
    Tiles,
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    query_tile_of,
)
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CausalMask, DualStreamMask
from wedlm_jax.sharding import on_own_shard

MAX_HEAD_DIM = 128
MIN_SIDE = 16
"""No side of a product is shorter."""


@dataclasses.dataclass(frozen=True)
class KernelTiles:
    """Tiles of the three kernels: output; queries' gradient; keys' and values' gradient."""

    forward: Tiles
    by_query: Tiles
    by_key: Tiles


def default_tiles(dtype: jnp.dtype, head_dim: int) -> KernelTiles:
    """For H100 and H200, chosen by what Triton's compiler makes of them: products by `wgmma`, at
    most a few registers spilled, shared memory for one program or more. Not timed.

    Args:
      dtype: of queries, keys and values. Tiles for float32, which is for comparisons, are small:
        its products take three passes over twice the bytes.
      head_dim: as padded.
    """
    narrow = head_dim <= 64
    if jnp.dtype(dtype).itemsize > 2:
        if narrow:
            return KernelTiles(Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2))
        return KernelTiles(*[Tiles(32, 32, 8, 2)] * 3)
    if narrow:
        return KernelTiles(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3))
    return KernelTiles(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2))


def attend_triton(
    q: Array,
    k: Array,
    v: Array,
    mask: CausalMask | DualStreamMask,
    *,
    tiles: KernelTiles | None = None,
    interpret: bool = False,
) -> Array:
    """Softmax attention under ``mask``; a row that sees nothing gives zeros.

    Args:
      q: ``[B, K, G, T, head_dim]``, grouped by KV head.
      k, v: ``[B, K, T, head_dim]``.
      mask: over T rows; T = 2L for the dual stream.
      tiles: of the kernels; default: `default_tiles`, smaller for short rows.
      interpret: run the kernels in Python on any device, for tests.

    Returns:
      ``[B, K, G, T, head_dim]`` in the dtype of ``q``.

    Raises:
      InputError: heads wider than `MAX_HEAD_DIM`.
    """
    batch, rows, head_dim = q.shape[0], q.shape[3], q.shape[4]
    if head_dim > MAX_HEAD_DIM:
        raise InputError(
            f"attention implementation 'triton' takes heads of at most {MAX_HEAD_DIM}, "
            f"not {head_dim}"
        )
    width = max(MIN_SIDE, pl.next_power_of_2(head_dim))
    streams, block_size = stream_layout(mask)
    length = rows // streams
    tiles = tiles or _fit(default_tiles(q.dtype, width), length)
    padding = -length % max(max(kernel.queries, kernel.keys) for kernel in _each(tiles))
    plan = Plan(
        StreamLayout(streams, length + padding, block_size), head_dim**-0.5,
        products_precision(q.dtype, interpret), tiles.forward, tiles.by_query, tiles.by_key,
        interpret,
    )  # fmt: skip
    segments = stream_segments(mask, batch, rows, padding)
    q, k, v = (_widen(pad_streams(x, streams, padding), width) for x in (q, k, v))
    # The compiler does not cut a kernel: each device runs it on its own rows and heads.
    axes = [("batch", "attention_heads")] * 3 + [("batch",)]
    out = on_own_shard(partial(_attend, plan), axes)(q, k, v, segments)
    return trim_streams(out[..., :head_dim], streams, padding)


def _each(tiles: KernelTiles) -> tuple[Tiles, Tiles, Tiles]:
    return tiles.forward, tiles.by_query, tiles.by_key


def _fit(tiles: KernelTiles, length: int) -> KernelTiles:
    """No tile much longer than a stream."""
    most = max(MIN_SIDE, pl.next_power_of_2(length))
    return KernelTiles(
        *(
            dataclasses.replace(x, queries=min(x.queries, most), keys=min(x.keys, most))
            for x in _each(tiles)
        )
    )


def _widen(x: Array, width: int) -> Array:
    """``[..., width]``: zeros behind, which change neither scores nor results."""
    missing = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def products_precision(dtype: jnp.dtype, interpret: bool) -> Any:
    """Of products of float32: three passes of tensor cores, which leave float32's precision;
    one pass would leave that of TF32."""
    if jnp.dtype(dtype).itemsize <= 2:
        return None
    return jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, segments: Array) -> Array:
    return _forward(plan, q, k, v, segments)[0]


def _forward(
    plan: Plan, q: Array, k: Array, v: Array, segments: Array
) -> tuple[Array, tuple[Array, ...]]:
    """The output, and what the backward pass needs: the inputs, the output, and each row's log2
    of the sum of exponentials ``[B, K, G, T]``."""
    tiles, layout = plan.forward, plan.layout
    seen = runs(visible_tiles(layout, segments, tiles.queries, tiles.keys), layout.streams)
    block = _QueryBlocks(plan, tiles, q)
    out, log_total = pl.pallas_call(
        partial(forward_kernel, plan=plan),
        grid=block.grid,
        in_specs=[block.runs, block.segments, block.tile, block.keys, block.keys],
        out_specs=[block.tile, block.rows],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
        ],
        **_options(plan, tiles, "attention_forward"),
    )(seen, segments, q, k, v)
    return out, (q, k, v, segments, out, log_total)


def _backward(plan: Plan, saved: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, segments, out, log_total = saved
    # Σ_j p_ij dp_ij, the term that softmax's gradient subtracts in each row.
    mean = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    arguments = (segments, q, k, v, d_out, log_total, mean)
    return _query_gradient(plan, *arguments), *_key_gradients(plan, *arguments), None


_attend.defvjp(_forward, _backward)


def _query_gradient(
    plan: Plan, segments: Array, q: Array, k: Array, v: Array, d_out: Array, log_total: Array,
    mean: Array,
) -> Array:  # fmt: skip
    tiles, layout = plan.by_query, plan.layout
    seen = runs(visible_tiles(layout, segments, tiles.queries, tiles.keys), layout.streams)
    block = _QueryBlocks(plan, tiles, q)
    return pl.pallas_call(
        partial(query_gradient_kernel, plan=plan),
        grid=block.grid,
        in_specs=[
            block.runs, block.segments, block.tile, block.keys, block.keys, block.tile,
            block.rows, block.rows,
        ],
        out_specs=block.tile,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        **_options(plan, tiles, "attention_query_gradient"),
    )(seen, segments, q, k, v, d_out, log_total, mean)  # fmt: skip


def _key_gradients(
    plan: Plan, segments: Array, q: Array, k: Array, v: Array, d_out: Array, log_total: Array,
    mean: Array,
) -> tuple[Array, Array]:  # fmt: skip
    tiles, layout = plan.by_key, plan.layout
    visible = visible_tiles(layout, segments, tiles.queries, tiles.keys).swapaxes(1, 2)
    batch, kv_heads, groups, rows, width = q.shape
    queries = pl.BlockSpec((None, None, groups, rows, width), lambda j, h, b: (b, h, 0, 0, 0))
    totals = pl.BlockSpec((None, None, groups, rows), lambda j, h, b: (b, h, 0, 0))
    keys = pl.BlockSpec((None, None, tiles.keys, width), lambda j, h, b: (b, h, j, 0))
    seen = pl.BlockSpec((None, None, layout.streams, 2), lambda j, h, b: (b, j, 0, 0))
    return pl.pallas_call(
        partial(key_gradient_kernel, plan=plan),
        grid=(rows // tiles.keys, kv_heads, batch),
        in_specs=[
            seen, pl.BlockSpec((None, rows), lambda j, h, b: (b, 0)), queries, keys, keys, queries,
            totals, totals,
        ],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        **_options(plan, tiles, "attention_key_gradients"),
    )(runs(visible, layout.streams), segments, q, k, v, d_out, log_total, mean)  # fmt: skip


class _QueryBlocks:
    """What one program of a kernel over tiles of queries is given: its tile, all keys of its
    KV head."""

    def __init__(self, plan: Plan, tiles: Tiles, q: Array):
        batch, kv_heads, groups, rows, width = q.shape
        streams = plan.layout.streams
        self.grid = (rows // tiles.queries, kv_heads * groups, batch)

        def tile(i: Array) -> Array:
            return query_tile_of(i, plan.layout, tiles)

        def head(h: Array) -> tuple[Array, Array]:
            return jax.lax.div(h, groups), jax.lax.rem(h, groups)

        self.tile = pl.BlockSpec(
            (None, None, None, tiles.queries, width), lambda i, h, b: (b, *head(h), tile(i), 0)
        )
        self.rows = pl.BlockSpec(
            (None, None, None, tiles.queries), lambda i, h, b: (b, *head(h), tile(i))
        )
        self.keys = pl.BlockSpec((None, None, rows, width), lambda i, h, b: (b, head(h)[0], 0, 0))
        self.segments = pl.BlockSpec((None, rows), lambda i, h, b: (b, 0))
        self.runs = pl.BlockSpec((None, None, streams, 2), lambda i, h, b: (b, tile(i), 0, 0))


def _options(plan: Plan, tiles: Tiles, name: str) -> dict[str, Any]:
    return {
        "compiler_params": backend.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        "interpret": plan.interpret,
        "name": name,
    }
