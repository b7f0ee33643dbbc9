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
    assert_logprobs_near,
    cases,
    cases_with_options,
    reference,
    run,
)
from tests.reference.logit_options import bad_words_in
from wedlm_jax.params import SamplingParams

AT_ONCE = SamplingParams(mode="paper", max_tokens=20, entropy_threshold=9.0)
"""Every mask is filled in the first forward that sees it."""


def assert_equal(result, answer):
    plain = dataclasses.asdict(dataclasses.replace(result, logprobs=None))
    assert not any(result.drafts)
    # Of these the reference knows nothing.
    for name in ("text", "further", "num_cached_tokens", "drafts_at"):
        del plain[name]
    assert plain == {**{name: getattr(answer, name) for name in plain}, "logprobs": None}
    assert_logprobs_near(result, answer)
    for ours, theirs in zip(result.logprobs or [], answer.logprobs or [], strict=True):
        best = [p for _, p in theirs.top]
        if all(a - b > 1e-4 for a, b in itertools.pairwise(best)):
            # Only the last may be another: what stands behind it is not known here.
            assert [t for t, _ in ours.top][:-1] == [t for t, _ in theirs.top][:-1]


@pytest.mark.parametrize("engine", ["streaming", "autoregressive"])
@given(data=st.data())
def test_the_engine_equals_the_python_loop(engine, request, full_forward, data):
    """With a window of 0, full forwards token by token. Of more sequences than decode together,
    later ones take the places and the pages of those that have finished."""
    window = 0 if engine == "autoregressive" else 4
    some = cases(window=window) | cases_with_options(window=window)
    batch = data.draw(st.lists(some, min_size=BATCH, max_size=2 * BATCH))
    results = run(request.getfixturevalue(f"{engine}_engine"), batch)
    compared = 0
    for case, result in zip(batch, results, strict=True):
        assert not bad_words_in(result.token_ids, case.params)
        answer = reference(full_forward, TINY, case)
        if answer.margin > SAFE_MARGIN:
            compared += 1
            assert_equal(result, answer)
    assume(compared)


def test_masks_that_are_filled_together_make_no_bad_word(streaming_engine, full_forward):
    """Pairs and triples that stand in the plain completion are forbidden; of the masks that would
    be filled with them in one forward the last one waits."""
    shown = compared = 0
    for first in range(2, 10):
        case = Case((first, 9, 4), AT_ONCE, 4)
        whole = run(streaming_engine, [case])[0]
        ids = whole.token_ids
        pairs, triples = itertools.pairwise(ids), zip(ids, ids[1:], ids[2:], strict=False)
        words = [*sorted({*pairs})[: 8 * (first % 2)], *sorted({*triples})]
        params = dataclasses.replace(AT_ONCE, bad_words=tuple(words))
        assert bad_words_in(ids, params)
        without = Case(case.prompt, params, 4)
        result, answer = run(streaming_engine, [without])[0], reference(full_forward, TINY, without)
        assert not bad_words_in(result.token_ids, params)
        if answer.margin > SAFE_MARGIN:
            compared += 1
            assert_equal(result, answer)
        waited = result.num_forwards / len(result.token_ids)
        shown += waited > whole.num_forwards / len(ids)
    assert shown
    assert compared > 4


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
