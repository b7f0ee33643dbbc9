"""Attention sees what its mask says, in every implementation, forward and backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jaxpr_shapes import equations_in, shapes_in
from tests.reference.masks import from_drawing
from tests.wedlm_jax.test_masks import DUAL_STREAM, DUAL_STREAM_SEGMENTS
from wedlm_jax.attention import IMPLEMENTATIONS, check_runs_on, dispatch, splash
from wedlm_jax.attention import attend as attend_eagerly
from wedlm_jax.attention.blockwise import attend_blockwise
from wedlm_jax.attention.tile_grid import TileGrid
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CausalMask, DualStreamMask

Arrays = tuple[jax.Array, jax.Array, jax.Array]

# One compilation instead of one an operation.
attend = jax.jit(attend_eagerly, static_argnames="implementation")

# Rows of 12 in blocks of 4: two samples with padding inside and behind, one long sample,
# and a row of padding only.
SEGMENTS = jnp.array([[1, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 0], [1] * 12, [0] * 12])
MASK = DualStreamMask(SEGMENTS, 4)


@pytest.fixture(autouse=True, scope="module")
def small_tiles_and_kernel_in_python():
    """Rows of 12 then make several tiles, and the kernel of TPUs runs here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "attend_blockwise", partial(attend_blockwise, tile=8))
        patch.setattr(splash, "attend_splash", partial(splash.attend_splash, interpret=True))
        yield


def random_qkv(length, batch=3, dtype="float32"):
    keys = jax.random.split(jax.random.key(length), 3)
    q = jax.random.normal(keys[0], (batch, length, 6, 8))
    k, v = (jax.random.normal(key, (batch, 2, length, 8)) for key in keys[1:])
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def reference(q, k, v, visible):
    """``q [B, T, H, h]``, ``k, v [B, K, S, h]``, ``visible [B, T, S]``: a query at a time."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[1]
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(visible[b, t])
        if not len(seen):
            continue
        keys, values = k[b, h // group, seen], v[b, h // group, seen]
        scores = keys.astype(np.float64) @ q[b, t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_query_weighs_exactly_the_keys_of_the_drawing(implementation):
    drawn = from_drawing(DUAL_STREAM)
    size = len(drawn)
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (1, size, 4, size))
    k = jax.random.normal(keys[1], (1, 2, size, size))
    # Values that are unit vectors make the output the attention weights themselves.
    v = jnp.broadcast_to(jnp.eye(size), (1, 2, size, size))
    mask = DualStreamMask(jnp.array([DUAL_STREAM_SEGMENTS]), 2)
    weights = np.asarray(attend(q, k, v, mask, implementation=implementation))[0]
    for head in range(4):
        np.testing.assert_array_equal(weights[:, head] > 0, drawn)
        np.testing.assert_allclose(weights[:, head].sum(-1), drawn.any(-1), atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dual_stream_attention_equals_the_reference(implementation):
    q, k, v = random_qkv(24)
    expected = reference(*map(np.asarray, (q, k, v)), np.asarray(MASK.dense()))
    out = attend(q, k, v, MASK, implementation=implementation)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("segments", [None, SEGMENTS])
def test_causal_attention_equals_the_reference(segments, implementation):
    q, k, v = random_qkv(12)
    mask = CausalMask(segments)
    expected = reference(*map(np.asarray, (q, k, v)), np.asarray(mask.dense(3, 12)))
    out = attend(q, k, v, mask, implementation=implementation)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "dense"])
def test_gradients_equal_those_of_dense(implementation):
    qkv = random_qkv(24)
    probe = jax.random.normal(jax.random.key(9), qkv[0].shape)

    def gradients(implementation):
        def scalar(q, k, v):
            return (attend(q, k, v, MASK, implementation=implementation) * probe).sum()

        return jax.jit(jax.grad(scalar, argnums=(0, 1, 2)))(*qkv)

    for own, dense in zip(gradients(implementation), gradients("dense"), strict=True):
        assert float(jnp.abs(dense).max()) > 0.1
        np.testing.assert_allclose(own, dense, atol=5e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_gives_zeros_and_takes_no_gradient(implementation):
    q, k, v = random_qkv(24)
    padding = np.tile(np.asarray(SEGMENTS) == 0, (1, 2))
    out = np.asarray(attend(q, k, v, MASK, implementation=implementation))
    assert (out[padding] == 0).all()
    assert (out[~padding] != 0).any(axis=(-1, -2)).all()

    def scalar(q, k, v):
        return (attend(q, k, v, MASK, implementation=implementation) ** 2).sum()

    by_q, by_k, by_v = (
        np.asarray(g) for g in jax.jit(jax.grad(scalar, argnums=(0, 1, 2)))(q, k, v)
    )
    for gradient in (by_q, by_k.swapaxes(1, 2), by_v.swapaxes(1, 2)):
        assert np.isfinite(gradient).all()
        assert (gradient[padding] == 0).all()
        assert (gradient[~padding] != 0).any()


def test_only_dense_builds_a_square_of_both_streams():
    def rows_by_columns(implementation):
        def scalar(*qkv):
            return attend_eagerly(*qkv, MASK, implementation=implementation).sum()

        traced = jax.make_jaxpr(jax.value_and_grad(scalar, argnums=(0, 1, 2)))(*random_qkv(24))
        return {shape[-2:] for shape in shapes_in(traced.jaxpr)}

    assert (24, 24) in rows_by_columns("dense")
    assert (24, 24) not in rows_by_columns("streams")
    assert (12, 12) in rows_by_columns("streams")
    # Padded to 16 rows a stream, in tiles of 8 by 8.
    assert (8, 8) in rows_by_columns("blockwise")
    assert max(map(min, filter(None, rows_by_columns("blockwise")))) <= 12


@pytest.mark.parametrize(("length", "block", "tile"), [(16, 4, 8), (16, 4, 4), (24, 2, 12)])
@pytest.mark.parametrize("streams", [1, 2])
def test_the_grid_holds_each_tile_that_any_query_sees_and_no_other(streams, length, block, tile):
    one = jnp.ones((1, length), jnp.int32)
    mask = DualStreamMask(one, block) if streams == 2 else CausalMask(one)
    dense = np.asarray(mask.dense() if streams == 2 else mask.dense(1, length))[0]
    grid = TileGrid(length, length * (streams - 1), tile, block if streams == 2 else 1)
    cut = dense.reshape(dense.shape[0] // tile, tile, -1, tile).swapaxes(1, 2)
    listed = {(i, j) for i, j in grid.visible().tolist()}
    assert listed == set(zip(*map(np.ndarray.tolist, cut.any((2, 3)).nonzero()), strict=True))
    for i, j in listed:
        np.testing.assert_array_equal(grid.seen(jnp.int32(i), jnp.int32(j)), cut[i, j])


@pytest.mark.parametrize(
    "block", [1, 4, *(pytest.param(x, marks=pytest.mark.full) for x in (2, 8, 16, 32))]
)
def test_the_kernels_pattern_is_the_mask(block):
    """Of streams whose length is a power of two, and of others."""
    for blocks in (1, 2, 3, 4, 5, 8, 12):
        length = blocks * block
        pattern = splash.DualStreamPattern(TileGrid(length, length, length, block))
        seen = pattern[:, :]
        mask = DualStreamMask(jnp.ones((1, length), jnp.int32), block)
        np.testing.assert_array_equal(seen, mask.dense()[0])
        # As the kernel reads it: int32, a query in each row.
        place = jnp.arange(2 * length, dtype=jnp.int32)
        np.testing.assert_array_equal(pattern.mask_function(place[:, None], place), seen)


@pytest.mark.parametrize(
    ("grid", "operations"),
    [
        (TileGrid(4096, 4096, 1024, 32), 7),
        (TileGrid(5120, 5120, 1024, 32), 11),
        (TileGrid(4096, 2048, 1024, 32, unit=32), 9),
    ],
)
def test_the_kernels_pattern_takes_few_operations_a_score(grid, operations):
    pattern = splash.DualStreamPattern(grid)
    tile = jnp.zeros((8, 128), jnp.int32)
    traced = jax.make_jaxpr(pattern.mask_function)(tile, tile).jaxpr
    assert len([*equations_in(traced)]) == operations


@pytest.mark.parametrize(("length", "block", "tile"), [(24, 3, 0), (1024, 256, 384)])
def test_the_kernel_refuses_block_sizes_that_its_pattern_does_not_hold_for(length, block, tile):
    q, k, v = random_qkv(2 * length, batch=1)
    mask = DualStreamMask(jnp.ones((1, length), jnp.int32), block)
    with pytest.raises(ValueError, match=f"2\\^n and divides a stream of .* not {block}"):
        attend_eagerly(q, k, v, mask, implementation="splash", tile=tile)


@pytest.mark.full
def test_long_rows_of_several_tiles_equal_dense_in_all_tiled_forms():
    """Tiles of their full size, a length that is no multiple of them, ragged segments."""
    length, block = 640, 32
    lengths = [[200, 96, 300], [620, 0, 0]]
    segments = np.zeros((2, length), np.int32)
    for row, sizes in zip(segments, lengths, strict=True):
        start = 0
        for number, size in enumerate(sizes, 1):
            row[start : start + size] = number if size else 0
            start += -(-size // block) * block
    mask = DualStreamMask(jnp.asarray(segments), block)
    qkv = random_qkv(2 * length, batch=2)
    probe = jax.random.normal(jax.random.key(1), qkv[0].shape)

    def run(implementation):
        def scalar(q, k, v):
            out = attend_eagerly(q, k, v, mask, implementation=implementation)
            return (out * probe).sum(), out

        gradients, out = jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))(*qkv)
        return [out, *gradients]

    dense = run("dense")
    for implementation in ("blockwise", "splash"):
        for own, expected in zip(run(implementation), dense, strict=True):
            np.testing.assert_allclose(own, expected, atol=3e-5)


def visited_tiles(kernel):
    """bool ``[query tile, key tile]`` of the forward pass."""
    lists = kernel.fwd_mask_info
    count = len(lists.data_next[0])
    visited = np.zeros((count, count), bool)
    for query, (flags, keys) in enumerate(
        zip(lists.block_mask[0], lists.data_next[0], strict=True)
    ):
        visited[query, np.asarray(keys)[np.asarray(flags) > 0]] = True
    return visited


@pytest.mark.full
def test_the_kernel_visits_tiles_of_a_samples_own_only():
    """Eight tiles a stream: samples of two and a half, of one and a half, and padding from the
    sixth on."""
    length, tile = 1024, 128
    segments = np.zeros(length, np.int32)
    segments[:320], segments[320:512] = 1, 2
    segments[512:640] = 3
    mask = DualStreamMask(jnp.asarray(segments)[None], 32)
    grid = TileGrid(length, length, tile, 32)
    kernel = splash._kernel(grid, 1, interpret=True)
    own = splash._of_row(kernel, grid, jnp.tile(jnp.asarray(segments), 2))
    dense = np.asarray(mask.dense())[0].reshape(16, tile, 16, tile).any((1, 3))
    padding = np.arange(16) % 8 >= 5
    visited = visited_tiles(own)
    # Of padding the diagonal is left, so that no row's sum is zero.
    np.testing.assert_array_equal(visited, dense | np.diag(padding))
    backward = own.dkv_mask_info.block_mask[0] > 0
    np.testing.assert_array_equal(backward, visited)
    # Without the samples: two triangles of 36, and the diagonal of the prediction stream.
    assert (int(visited.sum()), int((kernel.fwd_mask_info.block_mask > 0).sum())) == (29, 80)


def test_rows_of_other_samples_have_their_own_tiles():
    length, block, tile = 384, 32, 128
    segments = np.ones((2, length), np.int32)
    segments[0, 128:256], segments[0, 256:] = 2, 0
    mask = DualStreamMask(jnp.asarray(segments), block)
    qkv = random_qkv(2 * length, batch=2)
    probe = jax.random.normal(jax.random.key(1), qkv[0].shape)

    def run(implementation):
        def scalar(*qkv):
            out = attend_eagerly(*qkv, mask, implementation=implementation, tile=tile)
            return (out * probe).sum(), out

        gradients, out = jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))(*qkv)
        return [out, *gradients]

    for own, expected in zip(run("splash"), run("dense"), strict=True):
        np.testing.assert_allclose(own, expected, atol=3e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_are_scored_and_summed_in_float32(implementation):
    q, k, v = random_qkv(24, dtype="bfloat16")
    out = attend(q, k, v, MASK, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    exact = reference(*(np.asarray(x, np.float32) for x in (q, k, v)), np.asarray(MASK.dense()))
    # Only the weights and the result are rounded to 8 bits, each value of size 3 at most.
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=3 * 2**-8)
    exact_scores = attend(q * 30, k, v, MASK, implementation=implementation)
    q_seen = np.asarray(q * 30, np.float32)
    if implementation == "splash":
        # The kernel has no scale: it takes queries that are scaled, and rounded, before.
        scale = q.shape[-1] ** -0.5
        q_seen = np.asarray(q * 30 * scale, np.float32) / scale
    expected = reference(
        q_seen, *(np.asarray(x, np.float32) for x in (k, v)), np.asarray(MASK.dense())
    )
    # Scores in the hundreds: rounded to 8 bits they would be off by whole units.
    np.testing.assert_allclose(np.asarray(exact_scores, np.float32), expected, atol=3 * 2**-8)


def test_unknown_implementation_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'flash'.*dense.*streams"):
        attend_eagerly(*random_qkv(24), MASK, implementation="flash")


def test_a_kernel_is_refused_on_devices_that_it_is_not_for():
    check_runs_on("splash", "tpu")
    with pytest.raises(InputError, match="'splash' is for TPUs, not for 'gpu'"):
        check_runs_on("splash", "gpu")
    check_runs_on("blockwise", "gpu")
