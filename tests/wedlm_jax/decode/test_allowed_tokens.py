"""The bits of a grammar on the device, against a loop over rows and tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.examples.windows import Decoding, rows_of
from tests.jaxpr_shapes import arrays_in
from wedlm_jax.decode.options import Traits, abstract_options, all_allowed, allowed_tokens
from wedlm_jax.params import SamplingParams

VERIFIED, PAPER = SamplingParams(mode="verified"), SamplingParams(mode="paper")
SOME = [
    Decoding((3,), (4,), (4, 5, 6, None, None, None), VERIFIED),
    Decoding((3,), (), (3,), SamplingParams(mode="ar")),
    Decoding((3,), (), (None, 5, None), PAPER),
]


@pytest.mark.parametrize("vocab", [12, 32, 70])
def test_each_row_of_a_filled_slot_has_the_bits_of_the_slot_behind_it(vocab):
    rng = np.random.default_rng(vocab)
    masks = all_allowed(len(SOME), 4, vocab)
    assert masks.shape == (3, 4, -(-vocab // 32))
    masks[:] = rng.integers(0, 2**32, masks.shape, np.uint32)
    rows, named = rows_of(SOME)
    ours = jax.jit(allowed_tokens, static_argnums=2)(jnp.asarray(masks), rows, vocab)
    assert ours.shape == (len(named) + 2, vocab)
    for row, (sequence, slot, is_mask) in enumerate(named):
        words = [2**32 - 1] * vocab if is_mask else masks[sequence, slot - 1].tolist()
        expected = [words[token // 32] >> (token % 32) & 1 == 1 for token in range(vocab)]
        assert ours[row].tolist() == expected
    assert sum(not is_mask for *_, is_mask in named) == 4


def test_without_the_trait_there_are_none():
    traits = Traits.of(SamplingParams(regex="a"), 4)
    assert traits.grammar
    allowed = abstract_options(2, traits, 100).allowed
    assert allowed is not None
    assert (allowed.shape, allowed.dtype) == ((2, 4, 4), jnp.uint32)
    assert abstract_options(2, dataclasses.replace(traits, grammar=False), 100).allowed is None
    assert abstract_options(2, traits.without_windows, 100).allowed.shape == (2, 1, 4)


def test_a_row_takes_no_more_than_its_bits():
    rows, _ = rows_of(SOME)
    jaxpr = jax.make_jaxpr(lambda masks: allowed_tokens(masks, rows, 64))(all_allowed(3, 4, 64))
    assert max(np.prod(x.shape) for x in arrays_in(jaxpr.jaxpr)) <= rows.slot.shape[0] * 64
