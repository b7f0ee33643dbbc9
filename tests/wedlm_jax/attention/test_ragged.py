"""Ragged attention over pages against a loop over queries and heads, and what stays equal to the
bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.ragged import LAYER, Example, assert_attended, make_example, make_spans, run_xla
from tests.jaxpr_shapes import shapes_in
from wedlm_jax.attention.ragged_xla import make_tiles

TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 3e-2, jnp.int8: 2e-5}


def check(example, dtype, **how):
    assert_attended(example, *run_xla(example, dtype, **how), TOLERANCE[dtype])


LONGEST, FURTHEST, SEQUENCES = 20, 60, 6
"""Tokens of a span, tokens before it, and spans, at most."""

span_lists = st.lists(
    st.tuples(st.one_of(st.just(0), st.just(1), st.integers(2, LONGEST)), st.integers(0, FURTHEST)),
    min_size=1,
    max_size=SEQUENCES,
).filter(lambda spans: sum(length for length, _ in spans) > 0)


@pytest.mark.parametrize(
    ("page_size", "kv_heads", "group", "dtype", "deterministic", "together"),
    [
        (1, 1, 1, jnp.float32, False, False),
        (4, 2, 4, jnp.bfloat16, True, False),
        (8, 2, 3, jnp.int8, False, False),
        (32, 1, 2, jnp.float32, True, False),
        (4, 2, 4, jnp.float32, False, True),
        pytest.param(4, 1, 4, jnp.int8, True, False, marks=pytest.mark.full),
        pytest.param(8, 2, 1, jnp.float32, True, False, marks=pytest.mark.full),
        pytest.param(32, 2, 2, jnp.bfloat16, False, False, marks=pytest.mark.full),
        pytest.param(8, 2, 3, jnp.int8, False, True, marks=pytest.mark.full),
        pytest.param(32, 1, 2, jnp.bfloat16, True, True, marks=pytest.mark.full),
    ],
)
@given(spans=span_lists)
def test_spans_attend_to_what_they_see(
    page_size, kv_heads, group, dtype, deterministic, together, spans
):
    """All of one shape, which compiles once: what is less than the most is padding."""
    lengths, before = zip(*spans, *[(0, 0)] * (SEQUENCES - len(spans)), strict=True)
    columns = -(-(LONGEST + FURTHEST) // page_size)
    example = make_example(
        sum(lengths),
        lengths,
        before,
        page_size=page_size,
        kv_heads=kv_heads,
        group=group,
        padding=SEQUENCES * LONGEST + 5 - sum(lengths),
        columns=columns,
        num_pages=SEQUENCES * columns + 1,
    )
    check(example, dtype, deterministic=deterministic, together=together)


@pytest.mark.parametrize(
    ("lengths", "before"),
    [
        ([1], [200]),
        ([30], [100]),
        # More tokens at once than are taken together, and one that sees far more than the others.
        ([1] * 19, [5] * 18 + [250]),
        ([1, 20, 0, 1, 33, 2], [3, 60, 9, 100, 0, 31]),
    ],
    ids=["one", "chunk", "tokens", "mixed"],
)
@pytest.mark.parametrize(
    ("columns", "together"), [(80, False), (None, True)], ids=["wide-loops", "together"]
)
def test_shapes_of_forwards(lengths, before, columns, together):
    example = make_example(0, lengths, before, padding=3, columns=columns)
    check(example, jnp.float32, together=together)


def test_all_tiles_together_take_one_loop_over_the_longest_text():
    """Each turn of a loop goes back to a GPU's host."""
    example = make_example(0, [1] * 19 + [30, 20], [5] * 18 + [250, 90, 40], padding=3)

    def loops(together):
        text = str(jax.make_jaxpr(lambda: run_xla(example, together=together))())
        return text.count("while[") + text.count("scan[")

    # One for the spans of one token, one for the others.
    assert loops(True) == 2 < loops(False)
    tiles = make_tiles(example.spans, 72, 4, tile=6, block=64, together=True)
    assert int(tiles.single.groups) == int(tiles.longer.groups) == 1


def test_nothing_else_is_written():
    example = make_example(0, [1, 7, 0, 4], [10, 3, 0, 0], padding=5)
    _, pages = run_xla(example)
    written = np.array(pages) != example.pool
    pages_written = {int(page) for page in np.argwhere(written)[:, 0]}
    table = np.array(example.spans.page_table)
    # Pages of 4: token 10 is on page 2; tokens 3 to 9 on pages 0 to 2; tokens 0 to 3 on page 0.
    own = {table[0, 2], table[1, 0], table[1, 1], table[1, 2], table[3, 0]}
    trash = {0}
    assert pages_written == {LAYER * example.num_pages + page for page in own | trash}


def test_work_follows_what_is_visible():
    spans, _ = make_spans(np.random.default_rng(0), [1, 40, 0, 1], [700, 300, 0, 9], page_size=16)
    tiles = make_tiles(spans, 64, 16, tile=24, block=256)
    assert tiles.single.blocks.tolist() == [3, 1, 0, 0]
    assert int(tiles.single.groups) == 1
    assert tiles.longer.blocks[:2].tolist() == [2, 2]
    assert int(tiles.longer.groups) == 1  # as many as all tokens could fill, together
    assert tiles.longer.count[:3].tolist() == [24, 16, 0]


def test_tiles_are_about_as_long_as_the_spans_of_a_full_batch():
    """A span of two tokens in a tile of 32 would be 15 parts of padding. Deterministic tiles depend
    on no batch."""
    spans, _ = make_spans(np.random.default_rng(0), [2] * 32, [9] * 32, page_size=16)
    for size, tile in ((4, 4), (64, 8), (320, 16), (2000, 32)):
        made = jax.eval_shape(partial(make_tiles, spans, size, 16))
        fixed = jax.eval_shape(partial(make_tiles, spans, size, 16, deterministic=True))
        assert made.longer.tile == tile
        assert (fixed.longer.tile, fixed.longer.at_once) == (min(size, 32), 1)


BEFORE = 70
"""Tokens before the spans of a sequence whose bits are compared."""


def bits_of(cuts, dtype, *, index=0, others=((0, 0),) * 3, seed=0):
    """What the tokens of one sequence attend to, in spans of these lengths, among others.

    Args:
      index: its place among the N = 4 sequences.
      others: lengths of the others' spans, and of what stands before them.
      seed: of pages, and of all that is not this sequence's.
    """
    own = np.random.default_rng(99)
    total, kv_heads, group, head_dim, page_size, size = BEFORE + sum(cuts), 2, 2, 32, 16, 24
    k, v = own.standard_normal((2, total, kv_heads, head_dim)).astype(np.float32)
    q = own.standard_normal((total, kv_heads * group, head_dim)).astype(np.float32)
    outputs, start = [], BEFORE
    for length in cuts:
        spans = [*others[:index], (length, start), *others[index:]]
        rng = np.random.default_rng(seed)
        made, num_pages = make_spans(
            rng, *zip(*spans, strict=True), page_size=page_size, columns=16, num_pages=64
        )
        example = make_example(
            seed, [size], [59 * page_size], page_size=page_size, head_dim=head_dim
        )
        pool = np.resize(example.pool, (3 * num_pages, *example.pool.shape[1:]))
        table = np.array(made.page_table)[index]
        for i in range(start):
            page = LAYER * num_pages + table[i // page_size]
            pool[page, i % page_size, 0::2], pool[page, i % page_size, 1::2] = k[i], v[i]
        example = Example(made, pool, example.q.copy(), example.k.copy(), example.v.copy())
        flat, here = example.flat(index), slice(start, start + length)
        example.q[flat], example.k[flat], example.v[flat] = q[here], k[here], v[here]
        out, _ = run_xla(example, dtype, deterministic=True, tile=24)
        outputs.append(np.array(out[flat].astype(jnp.float32)))
        start += length
    return np.concatenate(outputs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("cuts", "where"),
    [
        ([12], {"seed": 1}),
        ([12], {"index": 3, "others": ((1, 100), (5, 30), (2, 0))}),
        ([1] * 12, {}),
        ([5, 1, 6], {"index": 2, "others": ((1, 7), (6, 200), (3, 3))}),
    ],
    ids=["pages", "neighbours", "token by token", "parts"],
)
def test_bits_depend_on_the_sequence_alone(dtype, cuts, where):
    np.testing.assert_array_equal(bits_of(cuts, dtype, **where), bits_of([12], dtype))


def test_no_scores_of_whole_tables_exist():
    """T tokens against a table for S places: no array is as large as T x S."""
    example = make_example(0, [64], [10], columns=4096)
    sizes = [np.prod(x) for x in shapes_in(jax.make_jaxpr(lambda: run_xla(example))().jaxpr)]
    assert len(sizes) > 50
    assert max(sizes) < 64 * 4096
