"""Attention sees what its mask says, in every implementation, forward and backward."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jaxpr_shapes import equations_in, shapes_in
from tests.reference.masks import dual_stream_matrix
from wedlm_jax.aot.topology import CHIPS
from wedlm_jax.attention import IMPLEMENTATIONS, check_runs_on, dispatch, splash
from wedlm_jax.attention import attend as attend_eagerly
from wedlm_jax.attention.dispatch import attend_blockwise
from wedlm_jax.attention.tiles import TILES, UNKNOWN, TileGrid, tile_side, tiles_that_meet
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CausalMask, DualStreamMask

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


def random_qkv(length, batch=3, dtype="float32", seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (batch, length, 6, 8))
    k, v = (jax.random.normal(key, (batch, 2, length, 8)) for key in keys[1:])
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def probed_qkv(length, batch=3, seed=0):
    """And what the output is multiplied with before it is summed up."""
    q, k, v = random_qkv(length, batch, seed=seed)
    return q, k, v, jax.random.normal(jax.random.key(seed + 100), q.shape)


def output_and_gradients(mask, qkv, implementation, tile=0):
    *inputs, probe = qkv

    @jax.jit
    def run(mask, *inputs):
        def scalar(*qkv):
            out = attend_eagerly(*qkv, mask, implementation=implementation, tile=tile)
            return (out * probe).sum(), out

        return jax.grad(scalar, argnums=(0, 1, 2), has_aux=True)(*inputs)

    gradients, out = run(mask, *inputs)
    return [np.asarray(x) for x in (out, *gradients)]


def assert_equal_to_dense(mask, qkv, implementation, tolerance=5e-6, tile=0):
    expected = output_and_gradients(mask, qkv, "dense")
    assert all(np.abs(x).max() > 0.1 for x in expected)
    for own, dense in zip(
        output_and_gradients(mask, qkv, implementation, tile), expected, strict=True
    ):
        np.testing.assert_allclose(own, dense, atol=tolerance)


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
@pytest.mark.parametrize("mask", [MASK, CausalMask(None), CausalMask(SEGMENTS)])
def test_attention_equals_the_reference(mask, implementation):
    """What it sees is the mask's matrix; a padded row's output is zero."""
    q, k, v = random_qkv(24 if mask is MASK else 12)
    dense = mask.dense() if mask is MASK else mask.dense(3, 12)
    expected = reference(*map(np.asarray, (q, k, v)), np.asarray(dense))
    out = attend(q, k, v, mask, implementation=implementation)
    np.testing.assert_allclose(out, expected, atol=2e-6)


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
    for blocks in (1, 3, 4, 12):
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
    message = f"a power of two and divides the stream of .* not {block}"
    with pytest.raises(ValueError, match=message):
        attend_eagerly(q, k, v, mask, implementation="splash", tile=tile)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_are_scored_and_summed_in_float32(implementation):
    q, k, v = random_qkv(24, dtype="bfloat16")
    # The splash kernel has no scale: it takes queries that are scaled, and rounded, before.
    scale = q.shape[-1] ** -0.5 if implementation == "splash" else 1.0
    for factor in (1, 30):
        out = attend(q * factor, k, v, MASK, implementation=implementation)
        assert out.dtype == jnp.bfloat16
        seen = np.asarray(q * factor * scale, np.float32) / scale
        keys_values = (np.asarray(x, np.float32) for x in (k, v))
        expected = reference(seen, *keys_values, np.asarray(MASK.dense()))
        # Only the weights and the result are rounded to 8 bits, each value of size 3 at most.
        # Scores, in the hundreds with a factor of 30, would then be off by whole units.
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=3 * 2**-8)


def test_what_cannot_run_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'flash'.*dense.*streams"):
        attend_eagerly(*random_qkv(24), MASK, implementation="flash")
    check_runs_on("splash", "tpu")
    with pytest.raises(InputError, match="'splash' is for TPUs, not for 'gpu'"):
        check_runs_on("splash", "gpu")
    check_runs_on("blockwise", "gpu")


def test_rows_of_other_samples_have_their_own_tiles():
    segments = np.ones((2, 384), np.int32)
    segments[0, 128:256], segments[0, 256:] = 2, 0
    mask = DualStreamMask(jnp.asarray(segments), 32)
    assert_equal_to_dense(mask, probed_qkv(2 * 384, batch=2), "splash", 3e-5, tile=128)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["blockwise", "splash"])
@pytest.mark.parametrize("some_blocks", [False, True])
def test_long_rows_of_several_tiles_equal_dense(implementation, some_blocks):
    """Tiles of their full size, streams that are no multiple of them, ragged segments, and blocks
    that leap."""
    length, block = 640, 32
    segments = np.zeros((2, length), np.int32)
    segments[0, :200], segments[0, 224:320], segments[0, 320:620] = 1, 2, 3
    segments[1, :630] = 1
    mask, places = DualStreamMask(jnp.asarray(segments), block), length // block
    if some_blocks:
        blocks = [[2, 5, 6, 9, 13, 14, 15, 20, 20], [0, 8, 9, 10, 15, 16, 17, 18, 19]]
        mask, places = DualStreamMask.of_blocks(mask.segment_ids, block, jnp.array(blocks)), 9
    tile = 128 if implementation == "splash" and some_blocks else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "attend_blockwise", partial(attend_blockwise, tile=128))
        qkv = probed_qkv(length + places * block, batch=2)
        assert_equal_to_dense(mask, qkv, implementation, 3e-5, tile)


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


# --- some blocks of the prediction stream ------------------------------------------------


BLOCK, STREAM, PLACES = 4, 24, 4
# Two samples with padding between; one long sample; a row without any prediction block.
PACKED = np.array([[1] * 6 + [0] * 2 + [2] * 15 + [0], [1] * 24, [1] * 12 + [0] * 12], np.int32)
BLOCKS = np.array([[1, 3, 5, 6], [0, 2, 4, 5], [6, 6, 6, 6]], np.int32)
PLACED = DualStreamMask.of_blocks(jnp.asarray(PACKED), BLOCK, jnp.asarray(BLOCKS))


@jax.jit
def matrix_of_blocks(segments, blocks):
    return DualStreamMask.of_blocks(segments[None], BLOCK, blocks[None]).dense()[0]


@given(
    is_chosen=st.lists(st.booleans(), min_size=6, max_size=6),
    sizes=st.lists(st.integers(1, 9), max_size=3),
)
def test_a_mask_of_some_blocks_is_the_whole_one_without_what_is_left_out(is_chosen, sizes):
    segments = []
    for number, size in enumerate(sizes, 1):
        room = -(-size // BLOCK) * BLOCK
        if len(segments) + room <= STREAM:
            segments += [number] * size + [0] * (room - size)
    segments += [0] * (STREAM - len(segments))
    chosen = np.flatnonzero(is_chosen)
    # Behind the blocks stand places without any, so that one shape serves all.
    blocks = np.array([*chosen, *[STREAM // BLOCK] * (7 - len(chosen))], np.int32)
    dense = np.asarray(matrix_of_blocks(np.array(segments), blocks))
    places = [STREAM + block * BLOCK + i for block in chosen for i in range(BLOCK)]
    rows = [*range(STREAM), *places]
    whole = dual_stream_matrix(segments, BLOCK)
    np.testing.assert_array_equal(dense[: len(rows), : len(rows)], whole[np.ix_(rows, rows)])
    assert not dense[len(rows) :].any()
    assert not dense[:, len(rows) :].any()


@pytest.mark.full
@pytest.mark.parametrize(
    ("ends", "blocks", "count"),
    [
        # Samples of two and a half tiles, of one and a half, and padding from the sixth tile on.
        # Two triangles of 36 and a diagonal of 8, without what other samples see.
        ((320, 512, 640), None, 29),
        # A tile of the first sample, one of the second, and one that has a block and then none. A
        # triangle a sample; what is before the predictions in their own samples; the diagonal.
        ((512, 1024), [4, 5, 6, 9, 18, 19, 28, 29, 31, 32, 32, 32], (10 + 10) + (3 + 4 + 4) + 3),
    ],
)
def test_tiles_that_no_query_sees_are_not_visited(ends, blocks, count):
    """Eight tiles of memory, and eight or three of predictions, which begin late."""
    length, tile, block = 1024, 128, 32
    segments = np.zeros((1, length), np.int32)
    for number, (start, end) in enumerate(pairwise((0, *ends)), 1):
        segments[0, start:end] = number
    mask, unit = DualStreamMask(jnp.asarray(segments), block), 0
    limits = None
    if blocks:
        mask, unit = DualStreamMask.of_blocks(mask.segment_ids, block, jnp.array([blocks])), block
        limits = mask.memory_before()
    own = jnp.concatenate([mask.segment_ids, mask.prediction_segments()], 1)
    grid = TileGrid(length, own.shape[1] - length, tile, block, unit)
    met = np.asarray(tiles_that_meet(grid, own, limits))[0]
    listed = np.zeros_like(met)
    listed[tuple(grid.visible().T)] = True
    tiles = own.shape[1] // tile
    seen = np.asarray(mask.dense())[0].reshape(tiles, tile, tiles, tile).any((1, 3))
    np.testing.assert_array_equal(met & listed, seen)
    row = [own[0]] if limits is None else [own[0], limits[0]]
    kernel = splash._of_row(splash._kernel(grid, 1, interpret=True), grid, *row)
    # Of padding the diagonal is left, so that no row's sum is zero.
    padding = np.asarray(own[0]).reshape(tiles, tile).max(1) == 0
    visited = visited_tiles(kernel)
    np.testing.assert_array_equal(visited, seen | np.diag(padding))
    np.testing.assert_array_equal(kernel.dkv_mask_info.block_mask[0] > 0, visited)
    assert int(visited.sum()) == count


@pytest.mark.parametrize(("length", "places", "block"), [(16, 2, 4), (64, 3, 16), (8, 5, 1)])
def test_the_kernels_pattern_of_some_blocks_is_the_mask(length, places, block):
    """Also of blocks at any places, and one behind the last."""
    random = np.random.default_rng(length)
    count = length // block
    blocks = np.sort(random.choice(count, places - 1, replace=False))
    blocks = np.array([[*blocks, count]], np.int32)
    mask = DualStreamMask.of_blocks(jnp.ones((1, length), jnp.int32), block, jnp.asarray(blocks))
    pattern = splash.DualStreamPattern(TileGrid(length, places * block, block, block, unit=block))
    numbers = pattern.numbers(mask.memory_before()[0])
    seen = pattern.mask_function(numbers[:, None], jnp.arange(len(numbers))[None])
    there = length + (places - 1) * block
    np.testing.assert_array_equal(seen[:there, :there], mask.dense()[0][:there, :there])
    # Padding is told apart by its segment: here it sees no more than itself.
    assert not np.asarray(seen)[there:, :there].any()


def test_rows_that_are_too_long_for_the_kernels_numbers_are_refused():
    splash.DualStreamPattern(TileGrid(131_072, 65_536, 128, 32, unit=32))
    with pytest.raises(InputError, match=r"rows of 262,144 tokens.*prediction_blocks = 8192"):
        splash.DualStreamPattern(TileGrid(262_144, 131_072, 128, 32, unit=32))


BEFORE = jnp.array([[1, 3, 10, 0], [5, 6, 7, 23], [2, 11, 0, 0]], jnp.int32)
OWN = jnp.array([[1, 1, 2, 0], [1, 1, 1, 1], [1, 1, 0, 0]], jnp.int32)
WINDOWS = DualStreamMask(jnp.asarray(PACKED), BLOCK, BEFORE, jnp.repeat(OWN, BLOCK, axis=1))
"""As a drafter's, which stand behind tokens, not behind whole blocks."""


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "dense"])
@pytest.mark.parametrize("mask", [MASK, PLACED, WINDOWS], ids=["whole", "blocks", "windows"])
def test_output_and_gradients_equal_those_of_dense(mask, implementation):
    length = 24 if mask is MASK else STREAM + PLACES * BLOCK
    assert_equal_to_dense(mask, probed_qkv(length), implementation)


# --- the side of the kernel's tiles ------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "given", "kind", "side"),
    [
        (4096, 0, "TPU v5", TILES["TPU v5"]),
        (4096, 0, "TPU of tomorrow", UNKNOWN),
        (4096, 256, "TPU v5", 256),
        (200, 0, "TPU v5", 256),
        (200, 0, None, 256),
        (8192, 0, None, UNKNOWN),
    ],
)
def test_the_side_is_the_recipes_or_the_chips(length, given, kind, side):
    assert tile_side(length, given, kind) == side


STEP_SECONDS = 0.35e-6
"""The overhead of one step of a kernel's grid, from the documentation of Pallas."""


def grid_seconds(length, side, peak_flops, head_dim=128):
    """An estimate of the time of the forward and backward pass of one head over a row of one sample
    of L tokens.

    Smaller tiles compute fewer invisible pairs; larger ones need fewer steps of the grid. The
    forward pass takes as many steps for every query tile as for the fullest; the backward pass
    takes all steps.
    """
    count = -(-length // side)
    visited = count * (count + 1) + count
    places = 2 * count * (count + 1) + (2 * count) ** 2
    products = 2 * head_dim * side**2 * (2 + 5) * visited
    return products / peak_flops + places * STEP_SECONDS


@pytest.mark.parametrize(
    ("kind", "chip"), [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e")]
)
def test_the_chips_side_takes_the_least_time(kind, chip):
    sides = (256, 512, 1024)
    times = {side: grid_seconds(4096, side, CHIPS[chip].peak_flops) for side in sides}
    assert min(times, key=times.__getitem__) == TILES[kind]
