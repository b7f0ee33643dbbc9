"""Verified decoding gives the tokens of AR decoding, whoever is there, whatever forwards cost, and
wherever drafts come from: masks, or copies of the text."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.decode import (
    EVERYTHING,
    Case,
    assert_logprobs_near,
    assert_same,
    cases_with_options,
    in_mode,
    run,
    say_the_same,
    small_engine,
)
from tests.forward_sizes import two_sizes
from tests.wedlm_jax.engine.accounts import check_accounts
from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.completion import Drafts, total_drafts
from wedlm_jax.engine.costs import CostTable
from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.windows import WindowChoice
from wedlm_jax.llm import LLM
from wedlm_jax.params import DRAFTS, SamplingParams
from wedlm_jax.records.questions import read_questions
from wedlm_jax.text import TextCodec

# --- a trained model, whose drafts are mostly right --------------------------------------


SMALL = {"max_batch_size": 8, "deterministic": True}
"""One size of forwards: little is compiled."""


@pytest.fixture(scope="module")
def prompts():
    codec = TextCodec.load(EMBEDDED_MODEL)
    regimes = read_questions(EMBEDDED_MODEL / "heldout.jsonl")
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


# --- any drafts --------------------------------------------------------------------------


LOOKUP = 5


@pytest.fixture(scope="module")
def engine(tiny_model):
    """Pages for little more than one sequence of full length: among several, some are preempted.
    Forwards of two sizes."""
    copying = SamplingParams(draft="lookup")
    expected = [*EVERYTHING, dataclasses.replace(copying, draft="both"), copying]
    with two_sizes():
        yield small_engine(tiny_model, expected, lookup=LOOKUP, num_pages=24)


@st.composite
def drafting(draw):
    """A text that repeats itself, or any; drafts of any kind, and seldom another mode."""
    case = draw(cases_with_options())
    if draw(st.booleans()):
        case = dataclasses.replace(case, prompt=(case.prompt * 3)[: draw(st.integers(1, 28))])
    return in_mode(
        case,
        draw(st.sampled_from(["verified", "verified", "verified", "paper", "ar"])),
        draft=draw(st.sampled_from(DRAFTS)),
        draft_budget=draw(st.sampled_from([0.0, 1.0, 2.0, 1e6])),
    )


@given(
    batch=st.lists(drafting(), min_size=1, max_size=7),
    header=st.lists(st.integers(0, 22), max_size=12),
    slope=st.sampled_from([0.0, 0.05, 1.0]),
    windows=st.sampled_from([None, 4]),
)
def test_drafts_change_no_token(engine, batch, header, slope, windows):
    """Also of prompts that share a header, are computed in chunks, and begin again for want of
    pages; by what forwards cost, drafts are taken always, at times or never. A paper sequence
    beside them is as alone."""
    sizes = engine.settings.program(engine.everything).sizes.tokens
    engine.device.costs = CostTable(sizes, [1 + slope * size for size in sizes])
    batch = [
        dataclasses.replace(case, prompt=(*header, *case.prompt)[-28:], window=windows)
        for case in batch
    ]
    before = engine.device.drafts
    results = run(engine, batch)
    expected = run(engine, [in_mode(case, "ar") for case in batch])
    assert engine.device.drafts == before.plus(total_drafts(results))
    for case, ours, theirs in zip(batch, results, expected, strict=True):
        if case.params.mode == "paper":
            assert_same(run(engine, [case])[0], ours)
            continue
        assert say_the_same(ours, theirs)
        assert_logprobs_near(ours, theirs)
        assert_counts_fit(case, ours)
    check_accounts(engine.scheduler)


def assert_counts_fit(case, result):
    drafts, draft = result.drafts, case.params.draft
    assert drafts.masks_accepted <= drafts.masks
    assert drafts.lookup_accepted <= drafts.lookup
    if draft in ("lookup", "none"):
        assert drafts.masks == 0
    if draft in ("auto", "masks", "none"):
        assert drafts.lookup == 0
    # Each forward commits a choice of its own, and drafts.
    accepted, forwards = drafts.masks_accepted + drafts.lookup_accepted, result.num_forwards
    assert len(result.token_ids) == forwards + accepted
    assert drafts.masks <= 3 * forwards
    assert drafts.lookup <= LOOKUP * forwards
    assert result.num_token_instances <= (2 * 4 + LOOKUP) * forwards


LOOPING = SamplingParams(
    mode="verified", draft="lookup", max_tokens=20, logit_bias={5: 30.0}, ignore_eos=True
)


def test_a_loop_takes_few_forwards_and_all_is_counted(engine):
    before = engine.device.drafts
    results = run(engine, [Case((5, 5, 5, 5), LOOPING, None)] * 3)
    for result in results:
        assert result.token_ids == [5] * 20
        # A token without drafts, then 1 + 5 at a time, of which the last need fewer.
        assert result.num_forwards == 5
        assert result.drafts == Drafts(lookup=16 - 1, lookup_accepted=16 - 1)
        assert result.num_token_instances == result.num_forwards + result.drafts.lookup
    new = Drafts(*(b - a for a, b in zip(before, engine.device.drafts, strict=True)))
    assert new == Drafts(lookup=45, lookup_accepted=45)


def test_masks_alone_draft_in_windows_of_a_fixed_width():
    def copies(window=None, widest=4, **params):
        return WindowChoice(widest, LOOKUP).lookup(
            Request(0, [5], SamplingParams(**params), window)
        )

    assert copies() == 0
    assert copies(draft="lookup") == copies(draft="both") == copies(widest=0) == LOOKUP
    assert copies(0, draft="lookup") == copies(mode="ar", widest=0) == 0
