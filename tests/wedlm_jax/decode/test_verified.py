"""Verified decoding gives the tokens of autoregressive decoding, whatever the masks draft."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.decode import (
    Case,
    assert_logprobs_near,
    assert_same,
    cases,
    cases_with_options,
    events_of,
    in_mode,
    requests_of,
    run,
    say_the_same,
    small_engine,
)
from tests.examples.windows import Decoding, options_of, state_of
from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.decode.verified import draft_rule, verify
from wedlm_jax.engine.windows import WindowChoice
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import read_questions
from wedlm_jax.text import TextCodec

BUDGETS = (0.0, 1.0, 3.0, 1e6)
SMALL = {"max_batch_size": 8, "deterministic": True}
"""One size of forwards: little is compiled."""


def test_masks_draft_until_the_budget_is_spent_but_never_the_first():
    entropies = jnp.array([[9.0, 5.0, 0.3, 0.3, 0.3, 0.1]] * 3)
    is_mask = jnp.array([[False, True, True, True, True, True]] * 3)
    drafts = draft_rule(entropies, is_mask, jnp.array([0.0, 0.7, 100.0]))
    assert drafts.astype(int).tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
    ]
    assert not draft_rule(entropies, is_mask, None).any()


def test_drafts_are_kept_up_to_the_first_wrong_one():
    """Slot 0 is the text's last token, three drafts stand behind it, then two masks."""
    params = SamplingParams(mode="verified", draft_budget=100.0)
    some = [Decoding((3,), (), (3, *drafts, None, None), params) for drafts in DRAFTS]
    chosen = jnp.array([[0, 5, 6, 7, 8, 9, 0, 0, 0]] * 4)
    budget = options_of(some).draft_budget
    found = verify(state_of(some), budget, chosen, jnp.ones(chosen.shape))
    assert found.run.tolist()[:3] == [4, 2, 1]
    assert [np.flatnonzero(kept).tolist() for kept in found.kept[:3]] == [[0, 1, 2, 3], [0, 1], [0]]
    # What the first mask stands for is known; and behind a wrong draft nothing is drafted.
    assert [np.flatnonzero(drafts).tolist() for drafts in found.drafts[:3]] == [[5], [], []]


DRAFTS = [(5, 6, 7), (5, 0, 7), (0, 6, 7)]


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


@pytest.fixture(scope="module")
def wide_engine(tiny_model):
    params = [SamplingParams(mode=mode, temperature=1.0, top_k=3) for mode in ("verified", "ar")]
    return small_engine(tiny_model, params, window_size=8, deterministic=True)


@pytest.mark.parametrize(
    "window", [8, *(pytest.param(window, marks=pytest.mark.full) for window in range(1, 8))]
)
def test_the_tokens_are_the_same_at_every_width(wide_engine, window):
    rng = np.random.default_rng(window)
    batch = []
    for seed in range(12):
        prompt = tuple(rng.integers(2, 23, rng.integers(1, 28)).tolist())
        params = SamplingParams(
            temperature=[0.0, 0.7][seed % 2], seed=seed, max_tokens=20, draft_budget=4.0
        )
        batch.append(Case(prompt, params, window))
    expected = run(wide_engine, [in_mode(case, "ar") for case in batch])
    assert all(map(say_the_same, run(wide_engine, batch), expected))


# --- windows that change -----------------------------------------------------------------


class Narrowing(WindowChoice):
    """Windows as requests want them, until all are 0."""

    narrow = False

    def choose(self, running):
        return [0] * len(running) if self.narrow else super().choose(running)


@pytest.fixture(scope="module")
def narrowing_engine(tiny_model):
    params = [SamplingParams(mode=mode, temperature=1.0, top_k=3) for mode in ("paper", "ar")]
    return small_engine(tiny_model, params, deterministic=True)


@given(case=cases(), before=st.integers(0, 6))
def test_a_paper_sequence_goes_on_token_by_token_from_what_it_has_committed(
    narrowing_engine, case, before
):
    """What was filled and not committed is forgotten."""
    engine = narrowing_engine
    engine.windows = windows = Narrowing(4)
    engine.scheduler = engine._new_scheduler()
    greedy = in_mode(case, "paper", temperature=0.0, top_k=0, top_p=1.0, stop_token_ids=())
    events = engine.step(requests_of([greedy]), max_forwards=0)
    for _ in range(before):
        if engine.has_work:
            events += engine.step(max_forwards=1)
    text = [token for event in events for token in getattr(event, "token_ids", [])]
    windows.narrow = True
    result = [*events, *events_of(engine)][-1].result
    left = greedy.params.max_tokens - len(text)
    if left == 0 or 1 in text:
        assert result.token_ids == text
        return
    rest = in_mode(Case((*case.prompt, *text), greedy.params, 0), "ar", max_tokens=left)
    assert result.token_ids == text + run(engine, [rest])[0].token_ids


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


@pytest.mark.parametrize(
    "window", [16, *(pytest.param(window, marks=pytest.mark.full) for window in (1, 2, 4, 8, 32))]
)
def test_the_trained_model_says_the_same_in_fewer_forwards(window, prompts, autoregressive):
    llm = LLM(window_size=window, **SMALL)
    for temperature, expected in autoregressive.items():
        token_ids, forwards = completions(llm, prompts, temperature, "verified")
        assert token_ids == expected
        if window > 2 and temperature == 0:
            assert sum(map(len, token_ids)) > 1.5 * forwards
