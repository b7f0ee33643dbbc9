"""Masks that are filled in one forward never complete a bad word together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import SLOTS, VOCAB, Decoding, options_of, sequences, state_of
from tests.reference.logit_options import bad_words_in, left_masked
from wedlm_jax.decode.logits import keep_apart
from wedlm_jax.params import SamplingParams

keep = jax.jit(keep_apart)


def chosen_and_tokens(some, seed):
    """Of each window some masks, and of few tokens one for each: ``[N, P]``."""
    rng = np.random.default_rng(seed)
    chosen = np.zeros((len(some) + 1, SLOTS), bool)
    for i, one in enumerate(some):
        for slot, token in enumerate(one.window):
            chosen[i, slot] = token is None and rng.random() < 0.8
    return chosen, rng.integers(0, 3, chosen.shape).astype(np.int32)


def with_words(one, words):
    return dataclasses.replace(one, params=dataclasses.replace(one.params, bad_words=words))


few = st.integers(0, 2)
short_words = st.lists(st.lists(few, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple)


@given(
    some=st.lists(sequences(), min_size=3, max_size=3),
    words=st.lists(short_words, min_size=3, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_the_last_new_token_of_each_word_is_left_out(some, words, seed):
    some = [with_words(one, theirs) for one, theirs in zip(some, words, strict=True)]
    chosen, tokens = chosen_and_tokens(some, seed)
    kept = np.asarray(keep(state_of(some), options_of(some), jnp.array(chosen), jnp.array(tokens)))
    for i, one in enumerate(some):
        if one.anchored:
            np.testing.assert_array_equal(kept[i], chosen[i])
            continue
        window = [
            int(tokens[i, slot]) if chosen[i, slot] else token
            for slot, token in enumerate(one.window)
        ]
        first = len(one.completion)
        new = [first + slot for slot in np.flatnonzero(chosen[i])]
        out = {place - first for place in left_masked([*one.completion, *window], new, one.params)}
        assert set(np.flatnonzero(chosen[i] & ~kept[i])) == out
        assert not (kept[i] & ~chosen[i]).any()


def test_none_of_the_words_stands_then_and_the_first_mask_is_filled():
    params = SamplingParams(mode="paper", bad_words=((1, 2), (2, 2), (2, 1, 2)))
    one = Decoding((2,), (), (None, None, 1, None), params)
    for first in range(3):
        for second in range(3):
            for last in range(3):
                tokens = np.zeros((2, SLOTS), np.int32)
                tokens[0, :4] = first, second, 0, last
                chosen = np.zeros((2, SLOTS), bool)
                chosen[0, [0, 1, 3]] = True
                if (1, last) in params.bad_words:
                    continue  # the row would not have chosen it
                kept = keep(state_of([one]), options_of([one]), jnp.array(chosen), tokens)[0]
                filled = [int(tokens[0, s]) if kept[s] else one.window[s] for s in range(4)]
                assert not bad_words_in(filled, params)
                assert filled[0] == first


def test_a_word_that_begins_in_the_prompt_is_none():
    params = SamplingParams(mode="paper", bad_words=((7, 8),))
    window = (None, None)
    chosen = np.zeros((2, SLOTS), bool)
    chosen[0, 0] = True
    tokens = np.full((2, SLOTS), 8, np.int32)
    for prompt, completion, expected in (((7,), (), True), ((3,), (7,), False)):
        one = Decoding(prompt, completion, window, params)
        kept = keep(state_of([one]), options_of([one]), jnp.array(chosen), jnp.array(tokens))
        assert bool(kept[0, 0]) is expected
    assert VOCAB > 8
