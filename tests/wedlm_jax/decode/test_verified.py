"""Verified decoding gives the tokens of autoregressive decoding, whatever the masks draft."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.decode import (
    assert_logprobs_near,
    assert_same,
    cases,
    cases_with_options,
    in_mode,
    run,
    say_the_same,
)
from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import read_questions
from wedlm_jax.text import TextCodec

BUDGETS = (0.0, 1.0, 3.0, 1e6)
SMALL = {"max_batch_size": 8, "deterministic": True}
"""One size of forwards: little is compiled."""


# --- the same tokens ---------------------------------------------------------------------


@st.composite
def mixed_rows(draw):
    """Four: two verified, one of each of the other modes, in any order, with any options."""
    modes = draw(st.permutations(["verified", "verified", "ar", "paper"]))
    some = cases() | cases_with_options()
    return [
        in_mode(draw(some), mode, draft_budget=draw(st.sampled_from(BUDGETS))) for mode in modes
    ]


@given(batch=mixed_rows())
def test_a_verified_sequence_has_the_tokens_of_an_autoregressive_one(streaming_engine, batch):
    """With its log-probabilities; and a paper sequence beside it is as alone."""
    expected = run(streaming_engine, [in_mode(case, "ar") for case in batch])
    for case, ours, theirs in zip(batch, run(streaming_engine, batch), expected, strict=True):
        if case.params.mode == "paper":
            assert_same(run(streaming_engine, [case])[0], ours)
        else:
            assert say_the_same(ours, theirs)
            assert_logprobs_near(ours, theirs)
        if case.params.mode == "verified":
            # Each adds one token at least; the first, which ends the prompt, is counted here.
            assert ours.num_forwards <= theirs.num_forwards + 1
            assert ours.num_token_instances <= 2 * case.window * ours.num_forwards


# --- with drafts that are mostly right ---------------------------------------------------


@pytest.fixture(scope="module")
def prompts():
    codec, regimes = (
        TextCodec.load(EMBEDDED_MODEL),
        read_questions(EMBEDDED_MODEL / "heldout.jsonl"),
    )
    return [question.encode(codec) for some in regimes.values() for question in some[:3]]


@pytest.fixture(scope="module")
def autoregressive(prompts):
    llm = LLM(window_size=0, **SMALL)
    return {t: completions(llm, prompts, t, "ar")[0] for t in (0.0, 0.8)}


def completions(llm, prompts, temperature, mode):
    """Token ids, and the forwards of all together."""
    llm.engine.expect([SamplingParams(mode=mode, temperature=0.8)])  # for both temperatures
    params = SamplingParams(mode=mode, temperature=temperature, max_tokens=48)
    results = llm.generate(prompts, params)
    return [r.token_ids for r in results], sum(r.num_forwards for r in results)


@pytest.mark.full
@pytest.mark.parametrize("window", [1, 2, 4, 8, 16, 32])
def test_the_trained_model_says_the_same_in_fewer_forwards(window, prompts, autoregressive):
    llm = LLM(window_size=window, **SMALL)
    for temperature, expected in autoregressive.items():
        token_ids, forwards = completions(llm, prompts, temperature, "verified")
        assert token_ids == expected
        if window > 2 and temperature == 0:
            assert sum(map(len, token_ids)) > 1.5 * forwards
