"""Drawing masks, reordering blocks, and laying the two streams behind each other."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.training import BLOCK, MASK_TOKEN, packed, random_sample
from tests.reference.training import dual_streams
from wedlm_jax.corruption import dual_stream, sample_masks

ROWS, LENGTH = 2, 16

draw_masks = jax.jit(sample_masks, static_argnames=("block_size", "suffix_share"))


@jax.jit
def _lay_out(rows, masked, ratio):
    batch = dual_stream(rows, masked, ratio, block_size=BLOCK, mask_token_id=MASK_TOKEN)
    return batch, batch.mask.dense()


def lay_out(rows, masked, ratio):
    """The batch and its dense mask, as NumPy arrays: cheap to take apart."""
    return jax.device_get(_lay_out(rows, masked, ratio))


flags = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
seeds = st.integers(0, 2**31 - 1)


def drawn(seed, trainable, block_size=BLOCK, **options):
    """``masked`` and ``ratio``, cut into blocks ``[R, L / B, B]``."""
    masked, ratio = draw_masks(
        jax.random.key(seed), jnp.asarray(trainable), block_size=block_size, **options
    )
    shape = (trainable.shape[0], -1, block_size)
    return np.asarray(masked).reshape(shape), np.asarray(ratio).reshape(shape)


@given(seed=seeds, trainable=st.lists(flags, min_size=ROWS, max_size=ROWS))
def test_each_block_masks_its_share_of_the_trainable_tokens(seed, trainable):
    trainable = np.array(trainable)
    masked, ratio = drawn(seed, trainable)
    blocks = trainable.reshape(masked.shape)
    assert not (masked & ~blocks).any()
    assert ((ratio > 0) & (ratio <= 1)).all()
    assert (ratio == ratio[..., :1]).all()
    expected = np.round(ratio[..., 0] * blocks.sum(-1).astype(np.float32))
    np.testing.assert_array_equal(masked.sum(-1), expected)


def test_a_key_names_its_masks():
    trainable = np.ones((400, 40), bool)
    first, again, other = (drawn(seed, trainable) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert (first[0] != other[0]).any()
    assert len(np.unique(first[1])) > 3990, "each block draws its own ratio"


# Bounds below are five standard deviations: what they let pass by chance is one in a million.


def test_ratios_are_uniform():
    _, ratio = drawn(0, np.ones((400, 40), bool))
    ratios = np.sort(ratio[..., 0].ravel())
    count = len(ratios)
    # The distribution function, everywhere (Kolmogorov-Smirnov).
    assert np.abs(ratios - np.arange(1, count + 1) / count).max() < 2.7 / count**0.5
    blocks = ratio[..., 0]
    assert abs(np.corrcoef(blocks[:, 0], blocks[:, 1])[0, 1]) < 5 / 400**0.5


def test_every_subset_of_a_block_is_equally_likely():
    # The third of five tokens is a prompt token: two of the other four are six subsets.
    trainable = np.tile([True, True, False, True, True], (12000, 1))
    masked, _ = drawn(1, trainable, block_size=5)
    pairs = masked[:, 0][masked.sum(-1)[:, 0] == 2]
    subsets, counts = np.unique(pairs, axis=0, return_counts=True)
    assert len(subsets) == 6
    share, total = 1 / 6, len(pairs)
    assert total > 2000
    assert np.abs(counts - total * share).max() < 5 * (total * share * (1 - share)) ** 0.5


def test_some_blocks_mask_their_last_trainable_tokens():
    trainable = np.tile([True] * 7 + [False], (8000, 1))
    masked, ratio = drawn(5, trainable, block_size=8, suffix_share=0.3)
    plain, same_ratio = drawn(5, trainable, block_size=8)
    np.testing.assert_array_equal(ratio, same_ratio)
    np.testing.assert_array_equal(masked.sum(-1), plain.sum(-1))
    masked, count = masked[:, 0, :7], masked.sum(-1)[:, 0]
    is_suffix = (masked == (np.arange(7) >= 7 - count[:, None])).all(-1)
    # One random subset of three is a suffix too.
    share = is_suffix[count == 3].mean()
    expected = 0.3 + 0.7 / 35
    assert abs(share - expected) < 5 * (expected * (1 - expected) / (count == 3).sum()) ** 0.5


@given(seed=seeds, lengths=st.lists(st.integers(1, 8), min_size=2, max_size=2))
def test_a_packed_sample_has_the_streams_it_has_alone(seed, lengths):
    random = np.random.default_rng(seed)
    samples = [random_sample(random, n, prompt=int(random.integers(n))) for n in lengths]
    (batch, dense), start = lay_out(*packed([samples], LENGTH)), 0
    for sample in samples:
        alone = dual_streams(sample, BLOCK, MASK_TOKEN)
        memory = start + np.arange(len(sample.tokens))
        both = np.concatenate([memory, LENGTH + memory])
        np.testing.assert_array_equal(batch.token_ids[0, both], alone.token_ids)
        np.testing.assert_array_equal(batch.positions[0, both], alone.positions)
        np.testing.assert_array_equal(batch.targets[0, memory], alone.targets)
        np.testing.assert_array_equal(batch.masked[0, memory], alone.masked)
        np.testing.assert_array_equal(batch.mask_ratio[0, memory], alone.ratio)
        np.testing.assert_array_equal(dense[0][np.ix_(both, both)], alone.matrix)
        others = np.setdiff1d(np.arange(2 * LENGTH), both)
        assert not dense[0][np.ix_(both, others)].any()
        start += -(-len(sample.tokens) // BLOCK) * BLOCK


def test_padding_is_never_masked():
    random = np.random.default_rng(0)
    rows, masked, ratio = packed([[random_sample(random, 6), random_sample(random, 3)]], LENGTH)
    batch, _ = lay_out(rows, jnp.ones_like(masked), ratio)
    expected = [MASK_TOKEN] * 6 + [0, 0] + [MASK_TOKEN] * 3 + [0] * 5
    assert batch.masked[0].tolist() == [token == MASK_TOKEN for token in expected]
    assert batch.token_ids[0, LENGTH:].tolist() == expected
