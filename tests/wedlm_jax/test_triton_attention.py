"""The kernels for NVIDIA GPUs: what they visit, that they lower for CUDA, what they refuse.

That they compute the right thing is in `test_attention`, like that of every form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.absent_gpu import on_a_gpu_that_is_not_here
from tests.jaxpr_shapes import shapes_in
from wedlm_jax.attention import attend
from wedlm_jax.attention.padding import stream_segments
from wedlm_jax.attention.runs import StreamLayout, runs, static_tiles, visible_tiles
from wedlm_jax.attention.streams import attend_streams
from wedlm_jax.attention.triton import KernelTiles, attend_triton, default_tiles
from wedlm_jax.attention.triton_kernels import Tiles
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CausalMask, DualStreamMask
from wedlm_jax.sharding import make_mesh

Arrays = tuple[jax.Array, ...]


def packed(length: int, block: int, sizes: list[list[int]]) -> jax.Array:
    """int32 ``[B, L]``: samples of these lengths, each padded to whole blocks."""
    segments = np.zeros((len(sizes), length), np.int32)
    for row, lengths in zip(segments, sizes, strict=True):
        start = 0
        for number, size in enumerate(lengths, 1):
            row[start : start + size] = number
            start += -(-size // block) * block
    return jnp.asarray(segments)


def dense_and_layout(segments: jax.Array, block: int, streams: int) -> tuple:
    """bool ``[B, T, T]``, the static part, and the segments of all rows."""
    length = segments.shape[1]
    mask = DualStreamMask(segments, block) if streams == 2 else CausalMask(segments)
    dense = mask.dense() if streams == 2 else mask.dense(len(segments), length)
    layout = StreamLayout(streams, length, block if streams == 2 else 1)
    return np.asarray(dense), layout, stream_segments(mask, len(segments), streams * length, 0)


def cut(dense: np.ndarray, query_tile: int, key_tile: int) -> np.ndarray:
    """bool ``[B, query tiles, key tiles]``: tiles in which any pair is visible."""
    batch, rows, columns = dense.shape
    tiles = dense.reshape(batch, rows // query_tile, query_tile, columns // key_tile, key_tile)
    return tiles.any((2, 4))


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("block", [1, 3, 4, 16])
@pytest.mark.parametrize(("query_tile", "key_tile"), [(8, 8), (16, 4), (4, 24)])
def test_static_tiles_are_those_that_any_query_sees(
    streams: int, block: int, query_tile: int, key_tile: int
) -> None:
    dense, layout, _ = dense_and_layout(jnp.ones((1, 48), jnp.int32), block, streams)
    expected = cut(dense, query_tile, key_tile)[0]
    np.testing.assert_array_equal(static_tiles(layout, query_tile, key_tile), expected)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(("query_tile", "key_tile"), [(8, 8), (16, 4), (4, 16)])
def test_runs_hold_every_visible_tile_and_few_others(
    streams: int, query_tile: int, key_tile: int
) -> None:
    segments = packed(64, 4, [[20, 9, 17], [64], [], [3, 50]])
    # An id may come again: the runs then hold what lies between, too.
    segments = jnp.concatenate([segments, jnp.array([[1] * 16 + [2] * 16 + [1] * 32])])
    dense, layout, of_rows = dense_and_layout(segments, 4, streams)
    needed = cut(dense, query_tile, key_tile)
    visible = np.asarray(visible_tiles(layout, of_rows, query_tile, key_tile))
    assert (visible | ~needed).all()
    assert visible.sum() <= 1.35 * needed.sum()
    for seen in (visible, visible.swapaxes(1, 2)):
        begin, end = np.moveaxis(np.asarray(runs(jnp.asarray(seen), streams)), -1, 0)
        tile = np.arange(seen.shape[2])
        walked = (begin[..., None] <= tile) & (tile < end[..., None])
        assert (walked.sum(2) <= 1).all(), "two streams' runs hold the same tile"
        assert (walked.any(2) | ~seen).all()
        np.testing.assert_array_equal(walked.any(2)[:-1], seen[:-1])
    assert not visible[2].any(), "padding alone is not visited"


@pytest.mark.parametrize(
    ("sizes", "most"),
    [([4096], 1.07), ([600, 1000, 2400], 1.27), ([200] * 18, 3.4)],
    ids=["one sample", "three", "eighteen"],
)
def test_the_pairs_visited_are_hardly_more_than_the_visible(sizes: list[int], most: float) -> None:
    block, length = 32, 4096
    mask = DualStreamMask(packed(length, block, [sizes]), block)
    layout, segments = StreamLayout(2, length, block), stream_segments(mask, 1, 2 * length, 0)
    # A token sees, in the memory and from the prediction stream, itself and all before it.
    needed = sum(size * (size + 1) for size in sizes)
    whole = default_tiles(jnp.dtype("bfloat16"), 128)
    for tiles in (whole.forward, whole.by_query, whole.by_key):
        visible = visible_tiles(layout, segments, tiles.queries, tiles.keys)
        for side in (visible, visible.swapaxes(1, 2)):
            begin, end = jnp.moveaxis(runs(side, 2), -1, 0)
            pairs = int((end - begin).sum()) * tiles.queries * tiles.keys
            assert needed <= pairs <= most * needed


def squares(mask: Callable, implementation: str) -> Callable[..., jax.Array]:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        out = attend(q, k, v, mask(segments), implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    return loss


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim", "dtype"),
    [
        (4096, 32, 8, 128, "bfloat16"),
        (4096, 28, 4, 128, "bfloat16"),
        (1000, 8, 2, 64, "bfloat16"),
        (2048, 8, 8, 80, "float32"),
    ],
)
@pytest.mark.parametrize("streams", [1, 2])
def test_forward_and_backward_lower_for_cuda_at_real_shapes(
    length: int, heads: int, kv_heads: int, head_dim: int, dtype: str, streams: int
) -> None:
    rows = 2
    q = jax.ShapeDtypeStruct((rows, streams * length, heads, head_dim), dtype)
    k = jax.ShapeDtypeStruct((rows, kv_heads, streams * length, head_dim), dtype)
    segments = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    mask = partial(DualStreamMask, block_size=32 if length % 32 == 0 else 8)
    loss = squares(mask if streams == 2 else CausalMask, "triton")
    with on_a_gpu_that_is_not_here():
        traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).trace(q, k, k, segments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 3
    # Rows stand beside heads' widths and single numbers, never beside rows.
    for shape in shapes_in(traced.jaxpr.jaxpr):
        assert sum(size >= 512 for size in shape) <= 1, shape


def test_wider_heads_than_the_kernels_hold_are_refused() -> None:
    q, k = jnp.zeros((1, 8, 2, 192)), jnp.zeros((1, 1, 8, 192))
    with pytest.raises(InputError, match="'triton' takes heads of at most 128, not 192"):
        attend(q, k, k, CausalMask(), implementation="triton")


def test_on_a_mesh_each_device_attends_its_own_rows_and_heads() -> None:
    rows, length, block = 2, 16, 4
    keys = jax.random.split(jax.random.key(0), 4)
    q, probe = (jax.random.normal(key, (rows, 2, 2, 2 * length, 16)) for key in keys[:2])
    k, v = (jax.random.normal(key, (rows, 2, 2 * length, 16)) for key in keys[2:])
    segments = packed(length, block, [[9, 3], [16]])
    tile = Tiles(8, 8, 1, 1)

    mask = DualStreamMask(segments, block)
    kernels = partial(attend_triton, tiles=KernelTiles(tile, tile, tile), interpret=True)

    def loss(form: Callable[..., jax.Array], *qkv: jax.Array) -> jax.Array:
        return (form(*qkv, mask) * probe).sum()

    def step(form: Callable[..., jax.Array]) -> tuple[jax.Array, Arrays]:
        return jax.jit(jax.value_and_grad(partial(loss, form), argnums=(0, 1, 2)))(q, k, v)

    expected = step(attend_streams)
    with jax.set_mesh(make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])):
        own = step(kernels)
    assert own[1][1].sharding.spec[:2] == ("data", "tensor")
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=5e-6)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("dtype", "atol"), [("bfloat16", 2e-2), ("float32", 1e-4)]
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_gpu_output_and_gradients_equal_those_of_blockwise(
    dtype: str, atol: float, head_dim: int
) -> None:
    """Compiled, not interpreted. `JAX_PLATFORMS=cuda pytest -k on_a_gpu` runs it."""
    length, block = 1000, 8
    segments = packed(length, block, [[300, 100, 500], [1000], []])
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (3, 2 * length, 8, head_dim)).astype(dtype)
    k, v = (jax.random.normal(key, (3, 2, 2 * length, head_dim)).astype(dtype) for key in keys[1:])
    mask = partial(DualStreamMask, block_size=block)
    with jax.default_matmul_precision("highest"):
        own, expected = (
            jax.jit(jax.value_and_grad(squares(mask, name), argnums=(0, 1, 2)))(q, k, v, segments)
            for name in ("triton", "blockwise")
        )
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=atol, atol=atol * np.abs(other).max())
