"""Each mask is the 0/1 matrix that a person draws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.masks import causal_matrix, dual_stream_matrix, from_drawing
from wedlm_jax.masks import CausalMask, DualStreamMask

# Blocks of two. Sample 1 has three tokens and one of padding, sample 2 has two tokens.
DUAL_STREAM_SEGMENTS = [1, 1, 1, 0, 2, 2]
DUAL_STREAM = """
                memory       prediction
           1 1 1 - 2 2      1 1 1 - 2 2
    m 1  | 1 . . . . .      . . . . . .
    m 1  | 1 1 . . . .      . . . . . .
    m 1  | 1 1 1 . . .      . . . . . .
    m -  | . . . . . .      . . . . . .
    m 2  | . . . . 1 .      . . . . . .
    m 2  | . . . . 1 1      . . . . . .
    p 1  | . . . . . .      1 . . . . .
    p 1  | . . . . . .      1 1 . . . .
    p 1  | 1 1 . . . .      . . 1 . . .
    p -  | . . . . . .      . . . . . .
    p 2  | . . . . . .      . . . . 1 .
    p 2  | . . . . . .      . . . . 1 1
"""

CAUSAL_SEGMENTS = [1, 1, 2, 2, 0]
CAUSAL = """
    1 | 1 . . . .
    1 | 1 1 . . .
    2 | . . 1 . .
    2 | . . 1 1 .
    - | . . . . .
"""


def test_dual_stream_mask_is_the_drawing():
    mask = DualStreamMask(jnp.array([DUAL_STREAM_SEGMENTS]), 2)
    drawn = from_drawing(DUAL_STREAM)
    assert drawn.shape == (12, 12)
    np.testing.assert_array_equal(mask.dense()[0], drawn)
    np.testing.assert_array_equal(dual_stream_matrix(DUAL_STREAM_SEGMENTS, 2), drawn)


def test_causal_mask_is_the_drawing():
    mask = CausalMask(jnp.array([CAUSAL_SEGMENTS]))
    drawn = from_drawing(CAUSAL)
    assert drawn.shape == (5, 5)
    np.testing.assert_array_equal(mask.dense(1, 5)[0], drawn)
    np.testing.assert_array_equal(causal_matrix(CAUSAL_SEGMENTS), drawn)


def test_causal_mask_without_segments_is_a_triangle_in_every_row():
    expected = np.tril(np.ones((4, 4), bool))
    np.testing.assert_array_equal(CausalMask().dense(3, 4), np.stack([expected] * 3))


@partial(jax.jit, static_argnums=1)
def dual_stream_dense(segments, block_size):
    return DualStreamMask(segments[None], block_size).dense()[0]


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 2, 3, 4]),
)
def test_dual_stream_mask_is_the_reference_matrix(lengths, block_size):
    segments = []
    for number, length in enumerate(lengths, 1):
        segments += [number] * length + [0] * (-length % block_size)
    segments += [0] * (36 - len(segments))  # one shape for all
    dense = dual_stream_dense(np.array(segments), block_size)
    np.testing.assert_array_equal(dense, dual_stream_matrix(segments, block_size))
