"""Options as arrays, the traits of programs, and what a model refuses."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from tests.examples.windows import ALL_TRAITS, VOCAB, option_params
from wedlm_jax.decode.options import (
    HostOptions,
    Options,
    Traits,
    Vocabulary,
    abstract_options,
    check_options,
)
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

PLAIN = SamplingParams(mode="paper", max_tokens=12)
WINDOW, LOOKUP = 4, 6
TRAITS = dataclasses.replace(ALL_TRAITS, lookup=LOOKUP)

EACH = [
    {"mode": "verified"},
    {"mode": "ar"},
    {"temperature": 0.5},
    {"temperature": 0.5, "top_k": 3},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 0.5, "min_p": 0.1},
    {"min_tokens": 3},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"logit_bias": {3: 1.0}},
    {"bad_words": ((3,), (4, 5, 6))},
    {"logprobs": 0},
    {"logprobs": 3},
]


@pytest.mark.parametrize("changes", EACH)
def test_a_program_holds_what_it_was_made_for(changes):
    plain = Traits.of(PLAIN, WINDOW)
    other = Traits.of(dataclasses.replace(PLAIN, **changes), WINDOW)
    both = plain.union(other)
    assert both == other.union(plain)
    assert both.holds(plain)
    assert both.holds(other)
    assert not plain.holds(other)
    everything = Traits.everything(WINDOW, grammar=True)
    assert everything.are_everything
    assert not both.are_everything
    assert everything.holds(both.rounded)
    assert both.rounded.holds(both)


def test_traits_are_those_that_programs_differ_by():
    def traits(window=WINDOW, **changes):
        return Traits.of(dataclasses.replace(PLAIN, **changes), window)

    def listed(count):
        """Lists of any length share a program."""
        words = ((1, 2), tuple(range(count))) * count
        return traits(logit_bias=dict.fromkeys(range(count), 1.0), bad_words=words, logprobs=count)

    assert len({listed(count) for count in (1, 2, 9, 16)}) == 1
    # Limits of what is not drawn are no trait; nor is a mode without a window.
    assert traits(top_k=5, top_p=0.5, min_p=0.1) == traits()
    assert len({traits(0, mode=mode) for mode in ("paper", "verified", "ar")}) == 1
    assert traits(0).anchored
    assert not traits().anchored
    assert Traits.everything(0, LOOKUP, grammar=True).verified
    without_masks = Traits.everything(0, grammar=True)
    assert not without_masks.paper | without_masks.verified
    arrays = abstract_options(3, traits(mode="ar"), VOCAB)
    there = {f.name for f in dataclasses.fields(arrays) if getattr(arrays, f.name) is not None}
    assert there == {"window", "stop_ids", "max_tokens"}


def filled(params):
    host = HostOptions(3, TRAITS)
    host.set(1, params, window=WINDOW, stops=(1, 5), lookup=LOOKUP)
    return host


def assert_same(ours, theirs):
    for field in dataclasses.fields(Options):
        one, two = getattr(ours, field.name), getattr(theirs, field.name)
        assert (one is None) == (two is None)
        if one is not None:
            np.testing.assert_array_equal(one, two)


@given(params=option_params("verified"))
def test_a_place_is_given_on_without_a_trace(params):
    host = filled(params)
    before = host.options()
    endless = SamplingParams(max_tokens=10**12, top_k=10**12, temperature=1.0)
    host.set(1, endless, window=WINDOW, stops=())
    assert host.options().max_tokens[1] == 2**31 - 1
    assert before.max_tokens[1] == params.max_tokens, "what was handed out does not change"
    host.set(1, PLAIN, window=2, stops=())
    fresh = HostOptions(3, TRAITS)
    fresh.set(1, PLAIN, window=2, stops=())
    assert_same(host.options(), fresh.options())
    host.clear(1)
    assert_same(host.options(), HostOptions(3, TRAITS).options())


@given(params=option_params("verified"))
def test_other_traits_hold_the_same_sequences_or_leave_them_out(params):
    host = filled(params)
    narrow = host.with_traits(Traits.of(params, WINDOW, LOOKUP))
    assert narrow.options().position_penalty is None
    assert_same(narrow.with_traits(TRAITS).options(), host.options())
    plain = Traits.of(PLAIN, WINDOW)
    assert_same(host.with_traits(plain).options(), HostOptions(3, plain).options())


@pytest.mark.parametrize(
    ("changes", "stops", "sentence"),
    [
        ({"logit_bias": {24: 1}}, 2, "logit_bias: 24 is outside the vocabulary of 24"),
        ({"logit_bias": dict.fromkeys(range(600), 1)}, 2, "logit_bias: 599 is outside"),
        ({"bad_words": [[3, 30]]}, 2, "bad_words: 30 is outside the vocabulary of 24"),
        ({"bad_words": ["text"]}, 2, "bad_words: the engine takes token ids"),
        ({"bad_words": [[3]] * 257}, 2, "bad_words: expected at most 256"),
        ({"bad_words": [[3] * 17]}, 2, "bad_words: expected at most 16 tokens in a word, not 17"),
        ({"bad_words": [[i] for i in range(23)]}, 2, "bad_words: these forbid all 23 "),
        (
            {"bad_words": [[i] for i in range(2, 23)], "min_tokens": 1},
            2,
            "bad_words: these forbid all 23 ",
        ),
        ({}, 65, r"stop_token_ids: expected at most 64, .* not 65"),
    ],
)
def test_options_that_a_model_cannot_have_are_refused(changes, stops, sentence):
    with pytest.raises(InputError, match=sentence):
        check_options(
            dataclasses.replace(PLAIN, **changes), range(stops), Vocabulary(24, 24, (23,))
        )


def test_too_many_biases_or_alternatives_are_refused():
    biases = dataclasses.replace(PLAIN, logit_bias=dict.fromkeys(range(513), 1.0))
    with pytest.raises(InputError, match="logit_bias: expected at most 512 tokens, not 513"):
        check_options(biases, (), Vocabulary(1000, 1000))
    with pytest.raises(InputError, match="logprobs: expected at most 3, the tokens that"):
        check_options(dataclasses.replace(PLAIN, logprobs=4), (), Vocabulary(9, 5, (0, 3)))
