"""Bias, penalties, minimum length, bad words and grammars of flat rows, against NumPy and against
autoregressive decoding; and that a program without them has nothing of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.windows import (
    ALL_TRAITS,
    LONGEST_TEXT,
    SLOTS,
    STOPS,
    VOCAB,
    WINDOW,
    Decoding,
    forward_of,
    options_of,
    rows_of,
    sequences,
    some_logits,
    state_of,
)
from tests.jaxpr_shapes import arrays_in, equations_in
from tests.reference.logit_options import adjusted, left_masked, seen_by_row
from wedlm_jax.decode.logits import adjusted_logits, keep_apart, token_use
from wedlm_jax.decode.options import (
    Traits,
    abstract_options,
    all_allowed,
    allowed_tokens,
    idle_options,
)
from wedlm_jax.decode.state import idle_state
from wedlm_jax.params import SamplingParams

PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}


@jax.jit
def adjust(logits, state, options, rows):
    return adjusted_logits(logits, state, options, rows, token_use(state, options, VOCAB))


def adjusted_rows(some, logits):
    given_rows, named = forward_of(some)
    return np.asarray(adjust(logits, *given_rows)), named


@given(some=st.lists(sequences(), min_size=3, max_size=3), seed=st.integers(0, 2**16))
def test_each_row_equals_numpy(some, seed):
    logits = some_logits(seed)
    ours, named = adjusted_rows(some, logits)
    for row, (i, slot, is_mask) in enumerate(named):
        one = some[i]
        seen = seen_by_row(one.completion, one.window, one.known, slot, is_mask)
        expected = adjusted(logits[row], one.params, one.prompt, seen, one.place(slot), STOPS)
        np.testing.assert_allclose(ours[row], expected, rtol=1e-5, atol=1e-5)


@given(one=sequences("verified"), seed=st.integers(0, 2**16))
def test_a_verified_row_is_the_autoregressive_row_of_its_drafts(one, seed):
    """To the last bit: the tokens that it chooses are those of autoregressive decoding."""
    logits = some_logits(seed)
    drafts = [token for token in one.window[1:] if token is not None]
    in_window, named = adjusted_rows([one] * 3, logits)
    for row, (_, slot, is_mask) in enumerate(named):
        if is_mask:
            continue
        completion = (*one.completion, *drafts[: slot - 1])
        params = dataclasses.replace(one.params, mode="ar")
        last = (one.prompt + completion)[-1]
        alone = Decoding(one.prompt, completion, (last,), params)
        again = np.zeros_like(logits)
        again[0] = logits[row]
        np.testing.assert_array_equal(in_window[row], adjusted_rows([alone] * 3, again)[0][0])


def traced(traits):
    """The jaxpr of a program with these traits."""
    sequences = 3
    state = idle_state(sequences, window=WINDOW, text=LONGEST_TEXT, emitted=1, with_logprobs=False)
    rows = rows_of([], padding=5)[0]
    options = idle_options(sequences, traits)
    return jax.make_jaxpr(adjust)(jnp.zeros((5, VOCAB)), state, options, rows).jaxpr


def test_without_options_logits_pass_untouched():
    plain = Traits(window=WINDOW, paper=True, verified=True, autoregressive=True, sampled=True)
    primitives = {equation.primitive.name for equation in equations_in(traced(plain))}
    assert primitives <= {"jit", "pjit"}


def test_only_penalties_count_tokens():
    def counts(traits):
        arrays = {(x.shape, str(x.dtype)) for x in arrays_in(traced(traits))}
        return ((3, VOCAB), "int32") in arrays

    assert counts(Traits(penalties=True))
    assert not counts(dataclasses.replace(ALL_TRAITS, penalties=False))


# --- bad words in masks that are filled together -----------------------------------------


keep = jax.jit(keep_apart)


def chosen_and_tokens(some, seed):
    """Of each window some masks, and of few tokens one for each: ``[N, P]``."""
    rng = np.random.default_rng(seed)
    chosen = np.zeros((len(some) + 1, SLOTS), bool)
    for i, one in enumerate(some):
        for slot, token in enumerate(one.window):
            chosen[i, slot] = token is None and rng.random() < 0.8
    return chosen, rng.integers(0, 3, chosen.shape).astype(np.int32)


def with_words(one, chosen, tokens, rng):
    """Forbids some of what would stand there then, and in part stands in the prompt."""
    window = [
        int(token) if new else slot
        for slot, new, token in zip(one.window, chosen, tokens, strict=False)
    ]
    text = [*one.prompt, *one.completion, *window]
    starts, lengths = rng.integers(0, len(text), 4), rng.integers(1, 5, 4)
    words = (tuple(text[i : i + n]) for i, n in zip(starts, lengths, strict=True))
    words = tuple(word for word in words if None not in word)
    forbidding = dataclasses.replace(one.params, bad_words=words)
    return dataclasses.replace(one, params=forbidding), window


@given(some=st.lists(sequences(), min_size=3, max_size=3), seed=st.integers(0, 2**16))
@settings(max_examples=10 * settings.default.max_examples)
def test_the_last_new_token_of_each_word_is_left_out(some, seed):
    chosen, tokens = chosen_and_tokens(some, seed)
    rng = np.random.default_rng(seed + 1)
    made = [with_words(*each, rng) for each in zip(some, chosen, tokens, strict=False)]
    some = [one for one, _ in made]
    kept = np.asarray(keep(state_of(some), options_of(some), jnp.array(chosen), jnp.array(tokens)))
    for i, (one, window) in enumerate(made):
        if one.anchored:
            np.testing.assert_array_equal(kept[i], chosen[i])
            continue
        first = len(one.completion)
        new = [first + slot for slot in np.flatnonzero(chosen[i])]
        out = {place - first for place in left_masked([*one.completion, *window], new, one.params)}
        assert set(np.flatnonzero(chosen[i] & ~kept[i])) == out
        assert not (kept[i] & ~chosen[i]).any()


# --- the bits of a grammar ---------------------------------------------------------------


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
    assert (allowed.shape, allowed.dtype) == ((2, 4, 4), jnp.uint32)
    assert abstract_options(2, dataclasses.replace(traits, grammar=False), 100).allowed is None
    assert abstract_options(2, traits.without_windows, 100).allowed.shape == (2, 1, 4)


def test_a_row_takes_no_more_than_its_bits():
    rows, _ = rows_of(SOME)
    jaxpr = jax.make_jaxpr(lambda masks: allowed_tokens(masks, rows, 64))(all_allowed(3, 4, 64))
    assert max(np.prod(x.shape) for x in arrays_in(jaxpr.jaxpr)) <= rows.slot.shape[0] * 64
