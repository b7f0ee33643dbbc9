"""Verified decoding of a trained model, whose drafts are mostly right."""

import pytest

from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import read_questions
from wedlm_jax.text import TextCodec

SMALL = {"max_batch_size": 8, "deterministic": True}
"""One size of forwards: little is compiled."""


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
