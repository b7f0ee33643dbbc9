"""Bias, penalties, minimum length, bad words and grammars of flat rows, against NumPy and against
autoregressive decoding; and that a program without them has nothing of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import (
    ALL_TRAITS,
    LONGEST_TEXT,
    VOCAB,
    WINDOW,
    Decoding,
    forward_of,
    rows_of,
    sequences,
    some_logits,
)
from tests.jaxpr_shapes import arrays_in, equations_in
from wedlm_jax.decode.logits import adjusted_logits, token_use
from wedlm_jax.decode.options import (
    HostOptions,
    Traits,
    all_allowed,
    allowed_tokens,
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
    options = HostOptions(sequences, traits).options()
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


# --- the bits of a grammar ---------------------------------------------------------------


def test_a_row_takes_no_more_than_its_bits():
    some = [Decoding((3,), (4,), (4, 5, None, None), SamplingParams(mode="verified"))] * 3
    rows, _ = rows_of(some)
    jaxpr = jax.make_jaxpr(lambda masks: allowed_tokens(masks, rows, 64))(all_allowed(3, 4, 64))
    assert max(np.prod(x.shape) for x in arrays_in(jaxpr.jaxpr)) <= rows.slot.shape[0] * 64
