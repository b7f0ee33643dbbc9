"""Bias, penalties, minimum length, bad words and log-probabilities: the compiled loop against
the plain Python one, and what they cost where nobody uses them."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.decode_examples import (
    ALL_OPTIONS,
    BATCH,
    SAFE_MARGIN,
    TINY,
    Row,
    reference,
    rows,
    rows_with_options,
    run,
    start_with_options,
)
from tests.jaxpr_shapes import arrays_in
from tests.reference.decode_loop import Decoded, FullForward
from tests.reference.logit_options import bad_words_in
from wedlm_jax import programs
from wedlm_jax.batch_sizes import BatchSizes
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.row_params import NO_OPTIONS, OptionSizes, idle_params
from wedlm_jax.row_result import RowResult
from wedlm_jax.params import RowParams, SamplingParams
from wedlm_jax.scheduler import Scheduler

PLAIN = SamplingParams(max_tokens=12, entropy_threshold=1.6)
AT_ONCE = SamplingParams(max_tokens=20, entropy_threshold=9.0)
"""Every mask is filled in the first forward that sees it."""


def run_with_options(engine: Engine, batch: list[Row]) -> list[RowResult]:
    running = start_with_options(engine, batch)
    assert running.advance()
    return running.results()


def assert_equal(result: RowResult, answer: Decoded) -> None:
    plain = dataclasses.asdict(dataclasses.replace(result, logprobs=None))
    assert plain == {**{name: getattr(answer, name) for name in plain}, "logprobs": None}
    assert (result.logprobs is None) == (answer.logprobs is None)
    for ours, theirs in zip(result.logprobs or [], answer.logprobs or [], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)
        best = [p for _, p in theirs.top]
        if all(a - b > 1e-4 for a, b in itertools.pairwise(best)):
            # Only the last may be another: what stands behind it is not known here.
            assert [t for t, _ in ours.top][:-1] == [t for t, _ in theirs.top][:-1]


def assert_equals_reference(engine: Engine, full_forward: FullForward, batch: list[Row]) -> None:
    compared = 0
    for row, result in zip(batch, run_with_options(engine, batch), strict=True):
        assert not bad_words_in(result.token_ids, row.params)
        answer = reference(full_forward, TINY, row)
        if answer.margin > SAFE_MARGIN:
            compared += 1
            assert_equal(result, answer)
    assume(compared)


def batches(window: int) -> st.SearchStrategy[list[Row]]:
    return st.lists(rows_with_options(window=window), min_size=BATCH, max_size=BATCH)


@given(batch=batches(window=4))
def test_streaming_with_options_equals_the_python_loop(
    streaming_engine: Engine, full_forward: FullForward, batch: list[Row]
) -> None:
    assert_equals_reference(streaming_engine, full_forward, batch)


@given(batch=batches(window=0))
def test_autoregressive_decoding_with_options_equals_the_python_loop(
    autoregressive_engine: Engine, full_forward: FullForward, batch: list[Row]
) -> None:
    assert_equals_reference(autoregressive_engine, full_forward, batch)


@given(row=rows(), others=st.lists(rows_with_options(), min_size=3, max_size=3))
def test_a_row_without_options_is_what_it_is_where_nobody_has_them(
    streaming_engine: Engine, full_forward: FullForward, row: Row, others: list[Row]
) -> None:
    assume(reference(full_forward, TINY, row).margin > SAFE_MARGIN)
    beside = run_with_options(streaming_engine, [row, *others])[0]
    assert beside == run(streaming_engine, [row])[0]


# --- bad words ---------------------------------------------------------------------------


def test_masks_that_are_filled_together_make_no_bad_word(
    streaming_engine: Engine, full_forward: FullForward
) -> None:
    """Pairs that stand in the plain completion are forbidden; the masks that would be filled
    with them in one forward then take more."""
    shown = 0
    for first in range(2, 10):
        row = Row((first, 9, 4), AT_ONCE, 4)
        whole = run(streaming_engine, [row])[0]
        pairs = tuple(sorted(set(itertools.pairwise(whole.token_ids))))[:8]
        params = dataclasses.replace(AT_ONCE, bad_words=pairs)
        assert bad_words_in(whole.token_ids, params)
        without = Row(row.prompt, params, 4)
        result = run_with_options(streaming_engine, [without])[0]
        assert not bad_words_in(result.token_ids, params)
        answer = reference(full_forward, TINY, without)
        if answer.margin > SAFE_MARGIN:
            assert_equal(result, answer)
            waited = result.num_forwards / len(result.token_ids)
            shown += waited > whole.num_forwards / len(whole.token_ids)
    assert shown


def test_a_bad_word_may_begin_in_the_prompt(autoregressive_engine: Engine) -> None:
    """Token by token, a word whose first token the completion lacks forbids nothing."""
    tried = 0
    for last in range(2, 22):
        row = Row((3, 9, last), PLAIN, 0)
        whole = run(autoregressive_engine, [row])[0]
        if last not in whole.token_ids:
            tried += 1
            params = dataclasses.replace(PLAIN, bad_words=((last, whole.token_ids[0]),))
            without = dataclasses.replace(row, params=params)
            assert run_with_options(autoregressive_engine, [without])[0] == whole
        if tried == 3:
            return
    pytest.fail("every completion has its prompt's last token")


# --- cost and sizes ----------------------------------------------------------------------


def arrays_of_the_loop(engine: Engine, options: OptionSizes) -> set[tuple[Any, ...]]:
    """Shapes and types of all that the decode loop of a batch with three rows computes."""
    sizes = BatchSizes(rows=3, cache_size=64, max_output=32, num_stops=4, options=options)
    params = RowParams(**{k: jnp.asarray(v) for k, v in idle_params(sizes, 4).items()})
    loop = partial(
        programs.advance_state, engine._graph, windows=(4,), refill="streaming", live=64,
        attention="dense",
    )  # fmt: skip
    number = jnp.int32(0)
    traced = jax.make_jaxpr(loop)(
        engine._parameters, engine.shapes_of(sizes), params, number, number
    )
    return {(array.shape, str(array.dtype)) for array in arrays_in(traced.jaxpr)}


def test_only_penalties_count_tokens(streaming_engine: Engine) -> None:
    counts = ((3, TINY.vocab_size), "int32")
    assert counts not in arrays_of_the_loop(streaming_engine, NO_OPTIONS)
    without = dataclasses.replace(ALL_OPTIONS, penalties=False, num_biases=0)
    assert counts not in arrays_of_the_loop(streaming_engine, without)
    assert counts in arrays_of_the_loop(streaming_engine, OptionSizes(penalties=True))


def test_a_plain_batch_holds_no_log_probabilities(streaming_engine: Engine) -> None:
    sizes = BatchSizes(rows=3, cache_size=64, max_output=32, num_stops=4)
    state = streaming_engine.shapes_of(sizes)
    assert state.logprobs is None
    assert state.output_logprobs is None
    assert set(idle_params(sizes, 4)) == {
        field.name for field in dataclasses.fields(RowParams) if field.default is not None
    }


OPTIONS: list[dict[str, Any]] = [
    {"min_tokens": 3},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"logit_bias": {3: 1.0}},
    {"bad_words": ((3,), (4, 5, 6))},
    {"logprobs": 0},
    {"logprobs": 3},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_batch_holds_what_it_was_opened_for(options: dict[str, Any]) -> None:
    params = dataclasses.replace(PLAIN, **options)
    sizes = OptionSizes.of([PLAIN, params])
    assert sizes != NO_OPTIONS
    assert sizes.holds(params)
    assert sizes.holds(PLAIN)
    assert not NO_OPTIONS.holds(params)
    assert ALL_OPTIONS.holds(params)


def test_a_longer_word_or_more_alternatives_need_another_batch() -> None:
    sizes = OptionSizes.of([dataclasses.replace(PLAIN, bad_words=((1, 2),), logprobs=0)])
    assert not sizes.holds(dataclasses.replace(PLAIN, bad_words=((1, 2, 3),)))
    assert not sizes.holds(dataclasses.replace(PLAIN, logprobs=1))


def test_a_request_with_options_waits_for_a_batch_that_has_them(
    streaming_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wedlm_jax.scheduler.LOOKAHEAD", 2)
    biased = dataclasses.replace(PLAIN, logit_bias={7: 100})
    requests = [((3 + i, 9), biased if i == 3 else PLAIN) for i in range(6)]
    results = dict(
        item for some in Scheduler(streaming_engine, requests, rows=2).run() for item in some
    )
    assert set(results[3].token_ids) == {7}
    for number in (0, 1, 2, 4, 5):
        prompt, params = requests[number]
        assert results[number] == run(streaming_engine, [Row(prompt, params, 4)])[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"logit_bias": {24: 1}}, "logit_bias: 24 is outside the vocabulary of 24"),
        ({"bad_words": [[3, 30]]}, "bad_words: 30 is outside the vocabulary of 24"),
        ({"bad_words": ["text"]}, "bad_words: the engine takes token ids"),
        ({"bad_words": [[3]] * 257}, "bad_words: expected 256 at most"),
        ({"bad_words": [[3] * 17]}, "bad_words: expected 16 tokens a word at most, not 17"),
        ({"bad_words": [[i] for i in range(23)]}, "bad_words: they leave no token"),
        (
            {"bad_words": [[i] for i in range(2, 23)], "min_tokens": 1, "stop_token_ids": (0,)},
            "bad_words: they leave no token",
        ),
        ({"logit_bias": dict.fromkeys(range(600), 1)}, "logit_bias: 599 is outside"),
    ],
)
def test_options_that_the_model_cannot_have_are_refused(
    streaming_engine: Engine, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        streaming_engine.check([3], dataclasses.replace(PLAIN, **options))
