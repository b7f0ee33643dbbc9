"""Bias, penalties, minimum length and bad words of flat rows, against NumPy and against
autoregressive decoding; and that a program without them has nothing of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import (
    ALL_TRAITS,
    LONGEST_TEXT,
    STOPS,
    VOCAB,
    WINDOW,
    Decoding,
    options_of,
    rows_of,
    sequences,
    state_of,
)
from tests.jaxpr_shapes import arrays_in, equations_in
from tests.reference.logit_options import adjusted, seen_by_row
from wedlm_jax.decode.logits import adjusted_logits, token_use, with_committed
from wedlm_jax.decode.options import Traits, idle_options
from wedlm_jax.decode.state import idle_state
from wedlm_jax.params import SamplingParams

LARGEST_ROWS = 40

PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}


@jax.jit
def adjust(logits, state, options, rows):
    return adjusted_logits(logits, state, options, rows, token_use(state, options, VOCAB))


def some_logits(seed):
    """float32 ``[LARGEST_ROWS, V]``, the last token never possible."""
    logits = 3 * np.random.default_rng(seed).normal(size=(LARGEST_ROWS, VOCAB))
    logits[:, -1] = -np.inf
    return logits.astype(np.float32)


def adjusted_rows(some, logits):
    _, named = rows_of(some, padding=0)
    rows, _ = rows_of(some, padding=LARGEST_ROWS - len(named))
    return np.asarray(adjust(logits, state_of(some), options_of(some), rows)), named


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


@given(some=st.lists(sequences(), min_size=3, max_size=3), data=st.data())
def test_counts_that_are_updated_equal_those_made_afresh(some, data):
    more = [
        dataclasses.replace(
            one,
            completion=(
                *one.completion,
                *data.draw(st.lists(st.integers(0, VOCAB - 2), max_size=2 * WINDOW + 1)),
            ),
        )
        for one in some
    ]
    before, after, options = state_of(some), state_of(more), options_of(some)
    updated = with_committed(token_use(before, options, VOCAB), before, after)
    afresh = token_use(after, options, VOCAB)
    assert updated is not None
    assert afresh is not None
    np.testing.assert_array_equal(updated.prompt, afresh.prompt)
    np.testing.assert_array_equal(updated.committed, afresh.committed)
    for i, one in enumerate(more):
        counts = np.bincount(np.array(one.completion, int), minlength=VOCAB)
        np.testing.assert_array_equal(afresh.committed[i], counts)
        assert set(np.flatnonzero(afresh.prompt[i])) == set(one.prompt)


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


def test_a_sequence_without_penalties_keeps_its_logits_to_the_bit():
    plain = Decoding((3, 4), (3, 3), (5, None, 6, None), SamplingParams(mode="paper"))
    penalised = dataclasses.replace(plain, params=SamplingParams(mode="paper", **PENALTIES))  # type: ignore[arg-type]
    logits = some_logits(3)
    ours, named = adjusted_rows([plain, penalised, plain], logits)
    changed = [i for row, (i, *_) in enumerate(named) if (ours[row] != logits[row]).any()]
    assert set(changed) == {1}


@pytest.mark.parametrize(
    ("mode", "window", "slot", "is_mask", "expected"),
    [
        # A mask counts what stands behind it too; the row of slot 0 does not see the draft 7.
        ("paper", (None, 7), 0, True, {2: 1, 7: 1}),
        ("verified", (2, 7, None), 1, False, {2: 1}),
        ("verified", (2, 7, None), 2, False, {2: 1, 7: 1}),
        ("verified", (2, 7, None, None), 3, True, {2: 1, 7: 1}),
    ],
)
def test_what_counts(mode, window, slot, is_mask, expected):
    one = Decoding((3,), (2,), window, SamplingParams(mode=mode, frequency_penalty=1.0))
    ours, named = adjusted_rows([one] * 3, np.zeros((LARGEST_ROWS, VOCAB), np.float32))
    counts = -ours[named.index((0, slot, is_mask))]
    assert {token: counts[token] for token in np.flatnonzero(counts)} == expected
