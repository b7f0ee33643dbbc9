"""A program without bias, penalties, minimum length and bad words has nothing of them. What they do
is compared in test_loop.py and test_verified.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.examples.windows import ALL_TRAITS, LONGEST_TEXT, VOCAB, WINDOW, Decoding, rows_of
from tests.jaxpr_shapes import arrays_in, equations_in
from wedlm_jax.decode.logits import adjusted_logits, token_use
from wedlm_jax.decode.options import HostOptions, Traits, all_allowed, allowed_tokens
from wedlm_jax.decode.state import idle_state
from wedlm_jax.params import SamplingParams

PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}


@jax.jit
def adjust(logits, state, options, rows):
    return adjusted_logits(logits, state, options, rows, token_use(state, options, VOCAB))


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
