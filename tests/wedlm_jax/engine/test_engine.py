"""What a row gets back from the engine, whatever else runs and however it is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode_examples import (
    LONGEST_COMPLETION,
    TINY,
    Row,
    batches,
    reference,
    rows,
    run,
    start,
)
from tests.reference.decode_loop import FullForward
from wedlm_jax import batch_sizes as sizes_module
from wedlm_jax.buckets import bucket
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.row_result import RowResult
from wedlm_jax.params import SamplingParams

RunOne = Callable[[Row], list[RowResult]]
PLAIN = SamplingParams(max_tokens=12, entropy_threshold=1.6)


@given(row=rows(), others=st.lists(rows(), min_size=3, max_size=3), place=st.integers(0, 3))
def test_a_row_alone_equals_the_row_among_any_others(
    streaming_engine: Engine, row: Row, others: list[Row], place: int
) -> None:
    batch = [*others[:place], row, *others[place:]]
    assert run(streaming_engine, batch)[place] == run(streaming_engine, [row])[0]


@pytest.fixture(scope="module")
def run_roomy(tiny_model: Transformer) -> RunOne:
    """Runs one row with more padding, a longer cache and a window wider than its own."""
    engine = Engine(tiny_model, window_size=5)

    def run_one(row: Row) -> list[RowResult]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sizes_module, "SMALLEST_PROMPT_BUCKET", 64)
            patch.setattr(sizes_module, "SMALLEST_OUTPUT_BUCKET", 64)
            return run(engine, [row])

    return run_one


@given(row=rows())
def test_buckets_and_the_engine_s_window_change_nothing(
    streaming_engine: Engine, run_roomy: RunOne, row: Row
) -> None:
    assert run_roomy(row) == run(streaming_engine, [row])


@given(batch=batches(), slices=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_slices_equal_all_at_once(
    streaming_engine: Engine, batch: list[Row], slices: list[int]
) -> None:
    expected = run(streaming_engine, batch)
    running = start(streaming_engine, batch)
    spent = 0
    for count in slices:
        done = running.advance(count)
        spent += count
        for partial, whole in zip(running.results(), expected, strict=True):
            assert partial.num_forwards == min(spent, whole.num_forwards)
            assert partial.token_ids == whole.token_ids[: len(partial.token_ids)]
            finished = whole.num_forwards <= spent
            assert partial.finish_reason == (whole.finish_reason if finished else None)
        assert done == all(whole.num_forwards <= spent for whole in expected)
    assert running.advance()
    assert running.results() == expected
    # Nothing is left to do, so nothing changes.
    assert running.advance()
    assert running.results() == expected


@given(batch=batches(), data=st.data())
def test_a_cut_row_is_counted_as_if_it_had_stopped_there(
    streaming_engine: Engine, batch: list[Row], data: st.DataObject
) -> None:
    """Cut at some token's first appearance, against a run with that token as a stop id."""
    cuts, stopping = [], []
    for row, whole in zip(batch, run(streaming_engine, batch), strict=True):
        end = data.draw(st.integers(1, len(whole.token_ids)))
        token = whole.token_ids[end - 1]
        first = whole.token_ids.index(token) + 1
        cuts.append(whole.cut(first))
        params = dataclasses.replace(row.params, stop_token_ids=(token,))
        stopping.append(dataclasses.replace(row, params=params))
    assert run(streaming_engine, stopping) == cuts


def test_a_stop_token_ends_the_row_and_is_kept(
    streaming_engine: Engine, full_forward: FullForward
) -> None:
    whole = run(streaming_engine, [Row((3, 9, 4), PLAIN, 4)])[0]
    stop = whole.token_ids[0]
    row = Row((3, 9, 4), dataclasses.replace(PLAIN, stop_token_ids=(stop,)), 4)
    result = run(streaming_engine, [row])[0]
    assert (result.token_ids, result.finish_reason) == ([stop], "stop")
    assert result.token_ids == reference(full_forward, TINY, row).token_ids


@pytest.mark.parametrize("kind", ["streaming", "blockwise", "autoregressive"])
def test_one_token_at_most(kind: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(f"{kind}_engine")
    prompts = [(3,), (4, 5), (6, 7, 8), (9, 10)]
    params = SamplingParams(max_tokens=1, entropy_threshold=9.0)
    batch = [Row(prompt, params, engine.window_size) for prompt in prompts]
    for result in run(engine, batch):
        assert len(result.token_ids) == 1
        assert result.finish_reason == ("stop" if result.token_ids == [1] else "length")
        # A window commits in the forward after the one that filled; prefill says AR's first.
        assert result.num_forwards == (2 if engine.window_size else 0)


def test_a_text_may_end_exactly_at_the_context_s_end(
    streaming_engine: Engine, full_forward: FullForward
) -> None:
    """The window then stands over the end, and its slots behind it disturb nothing."""
    longest = TINY.max_position_embeddings - LONGEST_COMPLETION
    params = SamplingParams(max_tokens=LONGEST_COMPLETION, entropy_threshold=1.6)
    ended = 0
    for first in range(2, 22, 4):
        batch = [Row(tuple([first + i, 7, 3, 11] * 7), params, 4) for i in range(4)]
        assert len(batch[0].prompt) == longest
        streaming_engine.check(batch[0].prompt, params)
        for row, result in zip(batch, run(streaming_engine, batch), strict=True):
            ended += result.finish_reason == "length"
            assert result.token_ids == reference(full_forward, TINY, row).token_ids
    assert ended


def test_finish_ends_one_row_and_no_other(streaming_engine: Engine) -> None:
    slow = dataclasses.replace(PLAIN, entropy_threshold=None)
    batch = [Row((3 + i, 9), slow, 4) for i in range(4)]
    expected = run(streaming_engine, batch)
    running = start(streaming_engine, batch)
    running.advance(2)
    before = running.results()[1]
    running.finish(1)
    assert running.advance()
    after = running.results()
    assert after[1] == dataclasses.replace(before, finish_reason="length")
    assert [after[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_the_window_as_the_next_forward_sees_it(streaming_engine: Engine) -> None:
    running = start(streaming_engine, [Row((3, 9, 4), PLAIN, 4)])
    view = running.window(0)
    assert (view.start, view.tokens, view.order) == (3, [None] * 4, [0, 1, 2, 3])
    while not running.advance(1):
        view = running.window(0)
        filled = [slot for slot, token in enumerate(view.tokens) if token is not None]
        masks = [slot for slot, token in enumerate(view.tokens) if token is None]
        assert view.start == 3 + len(running.results()[0].token_ids)
        assert view.order == filled + masks
        run_length = view.tokens.index(None)
        assert len(view.tokens) == 4 + run_length


def test_three_rows_give_three_results(streaming_engine: Engine) -> None:
    batch = [Row((3 + i, 9), PLAIN, 4) for i in range(3)]
    filled_up = run(streaming_engine, [*batch, batch[0]])
    assert run(streaming_engine, batch) == filled_up[:3]


def test_equal_shapes_compile_once(streaming_engine: Engine) -> None:
    run(streaming_engine, [Row((3, 9), PLAIN, 4)])
    spent = streaming_engine.compile_seconds
    assert spent > 0
    run(streaming_engine, [Row((4, 5, 6), dataclasses.replace(PLAIN, max_tokens=5), 2)])
    assert streaming_engine.compile_seconds == spent


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sentence"),
    [
        ([], 4, "the prompt has no tokens"),
        ([3, 24], 4, "prompt token id 24 lies outside the vocabulary of 24"),
        ([-1, 3], 4, "prompt token id -1 lies outside the vocabulary of 24"),
        ([0.5], 4, "expected a flat list of integers"),
        ([[3, 4]], 4, "expected a flat list of integers"),
        ([3] * 40, 9, "a prompt of 40 tokens and max_tokens 9 exceed max_model_len 48"),
    ],
)
def test_a_prompt_that_cannot_be_decoded_is_refused(
    streaming_engine: Engine, prompt: Any, max_tokens: int, sentence: str
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(InputError, match=sentence):
        streaming_engine.check(prompt, params)
    with pytest.raises(InputError, match=sentence):
        streaming_engine.start([[3], prompt], [PLAIN, params])


def test_a_prompt_that_just_fits_is_not_refused(streaming_engine: Engine) -> None:
    streaming_engine.check([23, 0] * 20, SamplingParams(max_tokens=8))
    streaming_engine.check(range(2, 4), SamplingParams(max_tokens=46))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window_size": -1}, "window_size: expected an integer of at least 0 or 'auto', not -1"),
        ({"window_size": True}, "window_size: expected an integer"),
        ({"window_size": 2.0}, "window_size: expected an integer"),
        ({"refill": "both"}, "refill: expected one of streaming, blockwise, not 'both'"),
        ({"max_model_len": 0}, "max_model_len: expected 1 to 48"),
        ({"max_model_len": 49}, "max_model_len: expected 1 to 48"),
    ],
)
def test_an_engine_that_cannot_run_is_refused(
    tiny_model: Transformer, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        Engine(tiny_model, **options)


def test_a_shorter_limit_is_the_one_that_counts(tiny_model: Transformer) -> None:
    engine = Engine(tiny_model, max_model_len=10)
    engine.check([3] * 6, SamplingParams(max_tokens=4))
    with pytest.raises(InputError, match="exceed max_model_len 10"):
        engine.check([3] * 6, SamplingParams(max_tokens=5))


def test_without_a_mask_token_only_a_window_of_0_runs() -> None:
    model = Transformer(
        dataclasses.replace(TINY, mask_token_id=None, num_hidden_layers=1), rngs=nnx.Rngs(0)
    )
    with pytest.raises(InputError, match="no mask_token_id"):
        Engine(model, window_size=4)
    engine = Engine(model, window_size=0)
    result = run(engine, [Row((3,), SamplingParams(max_tokens=3), 0)])[0]
    assert 1 <= len(result.token_ids) <= 3


@settings(max_examples=50)
@given(size=st.integers(0, 5000), smallest=st.integers(1, 64))
def test_a_bucket_is_the_smallest_that_holds_the_size(size: int, smallest: int) -> None:
    found = bucket(size, smallest)
    assert found >= max(size, smallest)
    assert found == smallest or found // 2 < size
    assert (found // smallest).bit_count() == 1
    assert found % smallest == 0
