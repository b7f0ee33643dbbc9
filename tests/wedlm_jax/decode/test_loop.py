"""The compiled loop against the plain Python one, with every option, and what a forward may not
change."""

import dataclasses
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.examples.decode import (
    BATCH,
    SAFE_MARGIN,
    TINY,
    Case,
    batches,
    cases,
    cases_with_options,
    reference,
    run,
)
from tests.reference.logit_options import bad_words_in
from wedlm_jax.params import SamplingParams

PLAIN = SamplingParams(mode="paper", max_tokens=12, entropy_threshold=1.6)
AT_ONCE = SamplingParams(mode="paper", max_tokens=20, entropy_threshold=9.0)
"""Every mask is filled in the first forward that sees it."""


def assert_equal(result, answer):
    plain = dataclasses.asdict(dataclasses.replace(result, logprobs=None))
    assert not any(result.drafts)
    # Of these the reference knows nothing.
    for name in ("text", "further", "num_cached_tokens", "drafts_at"):
        del plain[name]
    assert plain == {**{name: getattr(answer, name) for name in plain}, "logprobs": None}
    assert (result.logprobs is None) == (answer.logprobs is None)
    for ours, theirs in zip(result.logprobs or [], answer.logprobs or [], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)
        best = [p for _, p in theirs.top]
        if all(a - b > 1e-4 for a, b in itertools.pairwise(best)):
            # Only the last may be another: what stands behind it is not known here.
            assert [t for t, _ in ours.top][:-1] == [t for t, _ in theirs.top][:-1]


def assert_equals_reference(engine, full_forward, batch, refill="streaming"):
    compared = 0
    for case, result in zip(batch, run(engine, batch), strict=True):
        assert not bad_words_in(result.token_ids, case.params)
        answer = reference(full_forward, TINY, case, refill)
        if answer.margin > SAFE_MARGIN:
            compared += 1
            assert_equal(result, answer)
    assume(compared)


def batches_with_options(window):
    return st.lists(cases_with_options(window=window), min_size=BATCH, max_size=BATCH)


@given(batch=batches())
def test_streaming_equals_the_python_loop(streaming_engine, full_forward, batch):
    assert_equals_reference(streaming_engine, full_forward, batch)


@pytest.mark.full
@given(batch=batches())
def test_blockwise_equals_the_python_loop(blockwise_engine, full_forward, batch):
    assert_equals_reference(blockwise_engine, full_forward, batch, "blockwise")


@given(batch=batches(window=0))
def test_a_window_of_0_equals_full_forwards_token_by_token(
    autoregressive_engine, full_forward, batch
):
    assert_equals_reference(autoregressive_engine, full_forward, batch)


@given(batch=batches_with_options(window=4))
def test_streaming_with_options_equals_the_python_loop(streaming_engine, full_forward, batch):
    assert_equals_reference(streaming_engine, full_forward, batch)


@pytest.mark.full
@given(batch=batches_with_options(window=0))
def test_autoregressive_decoding_with_options_equals_the_python_loop(
    autoregressive_engine, full_forward, batch
):
    assert_equals_reference(autoregressive_engine, full_forward, batch)


@pytest.mark.full
@given(many=st.lists(cases_with_options(), min_size=5, max_size=10))
def test_more_than_decode_together_equal_the_python_loop(streaming_engine, full_forward, many):
    """Later ones take the places and the pages of those that have finished."""
    assert_equals_reference(streaming_engine, full_forward, many)


@pytest.mark.full
@given(batch=batches())
def test_the_sizes_of_a_forward_change_nothing(
    streaming_engine, one_size_engine, full_forward, batch
):
    ours, theirs = run(streaming_engine, batch), run(one_size_engine, batch)
    for case, one, other in zip(batch, ours, theirs, strict=True):
        if reference(full_forward, TINY, case).margin > SAFE_MARGIN:
            assert one == other


@pytest.mark.full
@given(case=cases(), others=st.lists(cases_with_options(), min_size=3, max_size=3))
def test_a_sequence_without_options_is_what_it_is_where_nobody_has_them(
    streaming_engine, one_size_engine, full_forward, case, others
):
    assume(reference(full_forward, TINY, case).margin > SAFE_MARGIN)
    assert run(streaming_engine, [case, *others])[0] == run(one_size_engine, [case])[0]


# --- bad words ---------------------------------------------------------------------------


def test_masks_that_are_filled_together_make_no_bad_word(streaming_engine, full_forward):
    """Pairs that stand in the plain completion are forbidden; the masks that would be filled
    with them in one forward then take more."""
    shown = 0
    for first in range(2, 10):
        case = Case((first, 9, 4), AT_ONCE, 4)
        whole = run(streaming_engine, [case])[0]
        pairs = tuple(sorted(set(itertools.pairwise(whole.token_ids))))[:8]
        params = dataclasses.replace(AT_ONCE, bad_words=pairs)
        assert bad_words_in(whole.token_ids, params)
        without = Case(case.prompt, params, 4)
        result = run(streaming_engine, [without])[0]
        assert not bad_words_in(result.token_ids, params)
        answer = reference(full_forward, TINY, without)
        if answer.margin > SAFE_MARGIN:
            assert_equal(result, answer)
            waited = result.num_forwards / len(result.token_ids)
            shown += waited > whole.num_forwards / len(whole.token_ids)
    assert shown


def test_a_bad_word_may_begin_in_the_prompt(autoregressive_engine):
    """Token by token, a word whose first token the completion lacks forbids nothing."""
    tried = 0
    for last in range(2, 22):
        case = Case((3, 9, last), PLAIN, 0)
        whole = run(autoregressive_engine, [case])[0]
        if last not in whole.token_ids:
            tried += 1
            params = dataclasses.replace(PLAIN, bad_words=((last, whole.token_ids[0]),))
            without = dataclasses.replace(case, params=params)
            assert run(autoregressive_engine, [without])[0] == whole
        if tried == 3:
            return
    pytest.fail("every completion has its prompt's last token")


# --- the edges of a text -----------------------------------------------------------------


def test_a_stop_token_ends_the_sequence_and_is_kept(streaming_engine, full_forward):
    whole = run(streaming_engine, [Case((3, 9, 4), PLAIN, 4)])[0]
    stop = whole.token_ids[0]
    case = Case((3, 9, 4), dataclasses.replace(PLAIN, stop_token_ids=(stop,)), 4)
    result = run(streaming_engine, [case])[0]
    assert (result.token_ids, result.finish_reason) == ([stop], "stop")
    assert result.token_ids == reference(full_forward, TINY, case).token_ids


@pytest.mark.parametrize("kind", ["streaming", "blockwise", "autoregressive"])
def test_one_token_at_most(kind, request):
    engine = request.getfixturevalue(f"{kind}_engine")
    window = engine.settings.window
    prompts = [(3,), (4, 5), (6, 7, 8), (9, 10)]
    params = SamplingParams(mode="paper", max_tokens=1, entropy_threshold=9.0)
    for result in run(engine, [Case(prompt, params, window) for prompt in prompts]):
        assert len(result.token_ids) == 1
        assert result.finish_reason == ("stop" if result.token_ids == [1] else "length")
        # A window commits in the forward after the one that filled.
        assert result.num_forwards == (2 if window else 1)


def test_a_text_may_end_exactly_at_the_context_s_end(streaming_engine, full_forward):
    """The window then stands over the end, and its slots behind it disturb nothing."""
    most = 20
    params = SamplingParams(mode="paper", max_tokens=most, entropy_threshold=1.6)
    ended = 0
    for first in range(2, 22, 4):
        batch = [Case(tuple([first + i, 7, 3, 11] * 7), params, 4) for i in range(4)]
        assert len(batch[0].prompt) == TINY.max_position_embeddings - most
        streaming_engine.check(batch[0].prompt, params)
        for case, result in zip(batch, run(streaming_engine, batch), strict=True):
            ended += result.finish_reason == "length"
            assert result.token_ids == reference(full_forward, TINY, case).token_ids
    assert ended
