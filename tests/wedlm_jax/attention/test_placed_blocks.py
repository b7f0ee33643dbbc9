"""Blocks that are left out of the prediction stream change nothing for those that are there."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.masks import dual_stream_matrix, placed_matrix
from tests.wedlm_jax.test_attention import visited_tiles
from wedlm_jax.attention import IMPLEMENTATIONS, attend, dispatch, splash
from wedlm_jax.attention.blockwise import attend_blockwise
from wedlm_jax.attention.tile_grid import TileGrid, tiles_that_meet
from wedlm_jax.errors import InputError
from wedlm_jax.masks import DualStreamMask

Arrays = tuple[jax.Array, ...]

BLOCK, LENGTH, PLACES = 4, 24, 4
# Two samples with padding between; one long sample; a row without any prediction block.
SEGMENTS = np.array([[1] * 6 + [0] * 2 + [2] * 15 + [0], [1] * 24, [1] * 12 + [0] * 12], np.int32)
BLOCKS = np.array([[1, 3, 5, 6], [0, 2, 4, 5], [6, 6, 6, 6]], np.int32)
MASK = DualStreamMask.of_blocks(jnp.asarray(SEGMENTS), BLOCK, jnp.asarray(BLOCKS))


@pytest.fixture(autouse=True, scope="module")
def small_tiles_and_kernel_in_python():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "attend_blockwise", partial(attend_blockwise, tile=8))
        patch.setattr(splash, "attend_splash", partial(splash.attend_splash, interpret=True))
        yield


def random_qkv(rows, batch, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    q, probe = (jax.random.normal(key, (batch, rows, 6, 8)) for key in keys[:2])
    k, v = (jax.random.normal(key, (batch, 2, rows, 8)) for key in keys[2:])
    return q, k, v, probe


def output_and_gradients(mask, qkv, implementation, tile=0):
    *inputs, probe = qkv

    @jax.jit
    def run(mask, *inputs):
        def scalar(*qkv):
            out = attend(*qkv, mask, implementation=implementation, tile=tile)
            return (out * probe).sum(), out

        return jax.grad(scalar, argnums=(0, 1, 2), has_aux=True)(*inputs)

    gradients, out = run(mask, *inputs)
    return [np.asarray(x) for x in (out, *gradients)]


def test_the_mask_is_the_reference():
    for dense, segments, blocks in zip(np.asarray(MASK.dense()), SEGMENTS, BLOCKS, strict=True):
        np.testing.assert_array_equal(dense, placed_matrix(segments, blocks, BLOCK))


@given(
    kept=st.lists(st.booleans(), min_size=6, max_size=6),
    spare=st.integers(0, 2),
    sizes=st.lists(st.integers(1, 9), max_size=3),
)
def test_the_mask_is_the_whole_one_without_what_is_left_out(kept, spare, sizes):
    segments = []
    for number, size in enumerate(sizes, 1):
        room = -(-size // BLOCK) * BLOCK
        if len(segments) + room <= LENGTH:
            segments += [number] * size + [0] * (room - size)
    segments += [0] * (LENGTH - len(segments))
    chosen = np.flatnonzero(kept)
    blocks = np.array([*chosen, *[LENGTH // BLOCK] * spare], np.int32)
    mask = DualStreamMask.of_blocks(jnp.array([segments]), BLOCK, jnp.asarray(blocks)[None])
    places = [LENGTH + block * BLOCK + i for block in chosen for i in range(BLOCK)]
    rows = [*range(LENGTH), *places]
    dense = np.asarray(mask.dense())[0]
    whole = dual_stream_matrix(segments, BLOCK)
    np.testing.assert_array_equal(dense[: len(rows), : len(rows)], whole[np.ix_(rows, rows)])
    assert not dense[len(rows) :].any()
    assert not dense[:, len(rows) :].any()


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "dense"])
def test_output_and_gradients_equal_those_of_dense(implementation):
    qkv = random_qkv(LENGTH + PLACES * BLOCK, batch=3)
    expected = output_and_gradients(MASK, qkv, "dense")
    assert all(np.abs(x).max() > 0.1 for x in expected)
    for own, dense in zip(output_and_gradients(MASK, qkv, implementation), expected, strict=True):
        np.testing.assert_allclose(own, dense, atol=5e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_left_out_gives_and_takes_nothing(implementation):
    """Rows that are there have the output and the gradients they have among all blocks."""
    q, k, v, probe = random_qkv(2 * LENGTH, batch=3)
    picked = np.zeros((3, LENGTH + PLACES * BLOCK), np.int32)
    there = np.ones_like(picked, bool)
    for row, blocks in enumerate(BLOCKS):
        places = [LENGTH + block * BLOCK + i for block in blocks for i in range(BLOCK)]
        picked[row] = [*range(LENGTH), *np.minimum(places, 2 * LENGTH - 1)]
        there[row, LENGTH:] = np.repeat(blocks < LENGTH // BLOCK, BLOCK)

    def few(x, axis):
        index = picked[:, None, :, None] if axis == 2 else picked[:, :, None, None]
        return jnp.take_along_axis(x, jnp.asarray(index), axis=axis)

    # Where only rows that stay are probed, the whole stream's gradients come from them alone.
    probe = probe.at[:, LENGTH:].set(0)
    for row, blocks in enumerate(BLOCKS):
        for block in blocks[blocks < LENGTH // BLOCK]:
            start = LENGTH + block * BLOCK
            values = jax.random.normal(jax.random.key(int(start)), (BLOCK, 6, 8))
            probe = probe.at[row, start : start + BLOCK].set(values)
    whole = DualStreamMask(jnp.asarray(SEGMENTS), BLOCK)
    expected = output_and_gradients(whole, (q, k, v, probe), "dense")
    own_probe = few(probe, 1) * there[:, :, None, None]
    own = output_and_gradients(MASK, (few(q, 1), few(k, 2), few(v, 2), own_probe), implementation)
    for ours, theirs, axis in zip(own, expected, (1, 1, 2, 2), strict=True):
        mark = there[:, :, None, None] if axis == 1 else there[:, None, :, None]
        theirs = np.asarray(few(jnp.asarray(theirs), axis))
        np.testing.assert_allclose(ours * mark, theirs * mark, atol=5e-6)
        assert not (ours * ~mark).any()


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["blockwise", "splash"])
def test_long_rows_of_several_tiles_equal_dense(implementation):
    """Tiles of their full size, streams that are no multiple of them, and blocks that leap."""
    length, block, places = 640, 32, 9
    segments = np.zeros((2, length), np.int32)
    segments[0, :200], segments[0, 224:320], segments[0, 320:620] = 1, 2, 3
    segments[1, :630] = 1
    blocks = np.array([[2, 5, 6, 9, 13, 14, 15, 20, 20], [0, 8, 9, 10, 15, 16, 17, 18, 19]])
    mask = DualStreamMask.of_blocks(jnp.asarray(segments), block, jnp.asarray(blocks, jnp.int32))
    qkv = random_qkv(length + places * block, batch=2)
    tile = 128 if implementation == "splash" else 0
    expected = output_and_gradients(mask, qkv, "dense")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "attend_blockwise", partial(attend_blockwise, tile=128))
        own = output_and_gradients(mask, qkv, implementation, tile)
    for ours, dense in zip(own, expected, strict=True):
        np.testing.assert_allclose(ours, dense, atol=3e-5)


@pytest.mark.full
def test_tiles_that_no_query_sees_are_not_visited():
    """Eight tiles of memory and three of predictions, which begin late."""
    length, tile, block = 1024, 128, 32
    segments = np.ones(length, np.int32)
    segments[512:] = 2
    # A tile of the first sample, one of the second, and one that has a block and then none.
    blocks = np.array([[4, 5, 6, 9, 18, 19, 28, 29, 31, 32, 32, 32]], np.int32)
    mask = DualStreamMask.of_blocks(jnp.asarray(segments)[None], block, jnp.asarray(blocks))
    grid = TileGrid(length, 384, tile, block, unit=block)
    limits, own = (
        mask.memory_before(),
        jnp.concatenate([mask.segment_ids, mask.prediction_segments()], 1),
    )
    met = np.asarray(tiles_that_meet(grid, own, limits))[0]
    listed = np.zeros_like(met)
    listed[tuple(grid.visible().T)] = True
    seen = np.asarray(mask.dense())[0].reshape(11, tile, 11, tile).any((1, 3))
    np.testing.assert_array_equal(met & listed, seen)
    kernel = splash._of_row(splash._kernel(grid, 1, interpret=True), grid, own[0], limits[0])
    np.testing.assert_array_equal(visited_tiles(kernel), seen)
    np.testing.assert_array_equal(kernel.dkv_mask_info.block_mask[0] > 0, seen)
    # A triangle a sample; what stands before the predictions in their own samples; the diagonal.
    assert int(seen.sum()) == (10 + 10) + (3 + 4 + 4) + 3


@pytest.mark.parametrize(("length", "places", "block"), [(16, 2, 4), (64, 3, 16), (8, 5, 1)])
def test_the_kernels_pattern_is_the_mask(length, places, block):
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


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_blocks_equal_dense_in_blockwise(data):
    kept = data.draw(st.lists(st.sets(st.integers(0, 5), max_size=PLACES), min_size=3, max_size=3))
    blocks = [[*sorted(one), *[6] * (PLACES - len(one))] for one in kept]
    mask = DualStreamMask.of_blocks(jnp.asarray(SEGMENTS), BLOCK, jnp.array(blocks, jnp.int32))
    qkv = random_qkv(LENGTH + PLACES * BLOCK, batch=3, seed=data.draw(st.integers(0, 9)))
    expected = output_and_gradients(mask, qkv, "streams")
    for ours, theirs in zip(output_and_gradients(mask, qkv, "blockwise"), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "dense"])
def test_windows_at_any_place_equal_dense(implementation):
    """As a drafter's, which stand behind tokens, not behind whole blocks."""
    before = jnp.array([[1, 3, 10, 0], [5, 6, 7, 23], [2, 11, 0, 0]], jnp.int32)
    own = jnp.array([[1, 1, 2, 0], [1, 1, 1, 1], [1, 1, 0, 0]], jnp.int32)
    mask = DualStreamMask(jnp.asarray(SEGMENTS), BLOCK, before, jnp.repeat(own, BLOCK, axis=1))
    qkv = random_qkv(LENGTH + PLACES * BLOCK, batch=3)
    expected = output_and_gradients(mask, qkv, "dense")
    assert all(np.abs(x).max() > 0.1 for x in expected)
    for found, dense in zip(output_and_gradients(mask, qkv, implementation), expected, strict=True):
        np.testing.assert_allclose(found, dense, atol=5e-6)
