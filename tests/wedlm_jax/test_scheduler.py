"""Rows that come and go: whoever else decodes, and whatever is taken over from whom, a request
gets the tokens it gets alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decode_examples import Row, rows, run
from wedlm_jax import batch as batch_module
from wedlm_jax import batch_sizes as sizes_module
from wedlm_jax import prefix as prefix_module
from wedlm_jax import scheduler as scheduler_module
from wedlm_jax.batch import Batch
from wedlm_jax.batch_sizes import BatchSizes
from wedlm_jax.engine.engine import Engine
from wedlm_jax.model import Transformer
from wedlm_jax.prefix import PrefixIndex, shared
from wedlm_jax.row_result import RowResult
from wedlm_jax.params import SamplingParams
from wedlm_jax.scheduler import Running, Scheduler

PLAIN = SamplingParams(max_tokens=12, entropy_threshold=1.6)


@pytest.fixture(autouse=True, scope="module")
def short_pieces() -> Iterator[None]:
    """Prompts of 28 tokens are then prefilled in pieces, and beginnings of 6 taken over."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sizes_module, batch_module, scheduler_module):
            patch.setattr(module, "LONGEST_PIECE", 8)
        patch.setattr(sizes_module, "SMALLEST_PROMPT_BUCKET", 8)
        patch.setattr(prefix_module, "SHORTEST_PREFIX", 6)
        yield


def scheduled(
    engine: Engine, requests: list[Row], slots: int, **options: object
) -> tuple[list[RowResult], Scheduler]:
    scheduler = Scheduler(
        engine, [(row.prompt, row.params) for row in requests], rows=slots,
        window_of=lambda number: requests[number].window, **options,
    )  # fmt: skip
    results = dict(item for some in scheduler.run() for item in some)
    assert len(results) == len(requests), "each of them once"
    return [results[number] for number in range(len(requests))], scheduler


@given(requests=st.lists(rows(), min_size=1, max_size=9), slots=st.sampled_from([1, 2, 4]))
def test_a_request_gets_what_it_gets_alone(
    streaming_engine: Engine, requests: list[Row], slots: int
) -> None:
    alone = [run(streaming_engine, [row])[0] for row in requests]
    assert scheduled(streaming_engine, requests, slots)[0] == alone


@st.composite
def with_headers(draw: st.DrawFn) -> list[Row]:
    """Requests that begin with the whole or a part of one header, or with none."""
    header = draw(st.lists(st.integers(0, 23), min_size=12, max_size=16))
    requests = []
    for row in draw(st.lists(rows(), min_size=2, max_size=9)):
        part = draw(st.integers(0, len(header)))
        prompt = (*header[:part], *row.prompt[: max(28 - part, 1)])
        requests.append(dataclasses.replace(row, prompt=prompt))
    return requests


@given(requests=with_headers(), slots=st.sampled_from([1, 2, 4]))
def test_shared_beginnings_change_no_token(
    streaming_engine: Engine, requests: list[Row], slots: int
) -> None:
    with_reuse, _ = scheduled(streaming_engine, requests, slots)
    without, plain = scheduled(streaming_engine, requests, slots, reuse_prefixes=False)
    assert with_reuse == without
    assert plain.reused_tokens == 0


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_shared_beginning_is_computed_once(streaming_engine: Engine, slots: int) -> None:
    header = tuple(range(2, 18))
    requests = [Row((*header, i + 2), PLAIN, 4) for i in range(8)]
    _, scheduler = scheduled(streaming_engine, requests, slots)
    assert scheduler.prefilled_tokens == len(header) + 8
    assert scheduler.reused_tokens == 7 * len(header)


def test_equal_prompts_are_prefilled_once(streaming_engine: Engine) -> None:
    requests = [Row((3, 4, 5, 6, 7, 8, 9), PLAIN, 4)] * 6
    results, scheduler = scheduled(streaming_engine, requests, 4)
    assert results == [run(streaming_engine, requests[:1])[0]] * 6
    assert scheduler.prefilled_tokens == 7


@pytest.mark.parametrize("mode", ["verified", "ar"])
def test_a_prompt_taken_over_predicts_its_own_first_token(
    streaming_engine: Engine, mode: str
) -> None:
    """From an equal prompt all is taken over, from a longer one not what is predicted behind."""
    params = dataclasses.replace(PLAIN, mode=mode)
    long, short = (3, 4, 5, 6, 7, 8, 9, 2, 2), (3, 4, 5, 6, 7, 8, 9)
    requests = [Row(prompt, params, 4) for prompt in (long, long, short, short)]
    results, scheduler = scheduled(streaming_engine, requests, 1)
    alone = [run(streaming_engine, [row])[0] for row in (requests[0], requests[2])]
    assert results == [alone[0], alone[0], alone[1], alone[1]]
    assert scheduler.reused_tokens == len(long) + (len(short) - 1) + len(short)


def test_the_same_requests_again_compile_nothing(streaming_engine: Engine) -> None:
    rng = np.random.default_rng(0)
    requests = [
        Row(tuple(rng.integers(2, 22, rng.integers(1, 28)).tolist()), PLAIN, 4) for _ in range(20)
    ]
    scheduled(streaming_engine, requests, 4)
    programs = streaming_engine.num_programs
    again, _ = scheduled(streaming_engine, requests[::-1], 4)
    assert streaming_engine.num_programs == programs
    assert len(again) == 20


def test_requests_are_read_only_some_way_ahead(
    streaming_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "LOOKAHEAD", 3)
    read = 0

    def requests() -> Iterator[tuple[tuple[int, ...], SamplingParams]]:
        nonlocal read
        for i in range(30):
            read += 1
            yield (3 + i % 5, 9), PLAIN

    finished = 0
    for some in Scheduler(streaming_engine, requests(), rows=2).run():
        finished += len(some)
        # Two in rows, two that finished with them, three ahead.
        assert read <= finished + 7
    assert finished == read == 30


def test_a_request_larger_than_all_before_waits_for_a_larger_batch(
    streaming_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "LOOKAHEAD", 2)
    small = [Row((3 + i, 9), PLAIN, 4) for i in range(5)]
    stops = dataclasses.replace(PLAIN, stop_token_ids=(2, 3, 4, 5, 6, 7), max_tokens=3)
    requests = [*small[:3], Row((4, 5), stops, 4), *small[3:]]
    alone = [run(streaming_engine, [row])[0] for row in requests]
    assert scheduled(streaming_engine, requests, 2)[0] == alone


def test_a_row_that_is_over_ends_early_and_no_other(streaming_engine: Engine) -> None:
    slow = dataclasses.replace(PLAIN, entropy_threshold=None, stop=("watched",))
    requests = [Row((3 + i, 9), slow if i == 1 else PLAIN, 4) for i in range(4)]
    whole = [run(streaming_engine, [row])[0] for row in requests]
    seen: list[int] = []

    def is_over(result: RowResult, params: SamplingParams) -> bool:
        assert params is slow
        seen.append(len(result.token_ids))
        return len(result.token_ids) >= 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "FORWARDS_PER_SLICE", 2)
        results, _ = scheduled(streaming_engine, requests, 4, is_over=is_over)
    assert 3 <= len(results[1].token_ids) < len(whole[1].token_ids)
    assert results[1].token_ids == whole[1].token_ids[: len(results[1].token_ids)]
    assert [results[i] for i in (0, 2, 3)] == [whole[i] for i in (0, 2, 3)]
    assert seen == sorted(seen)


def test_the_running_rows_are_counted(streaming_engine: Engine) -> None:
    turns: list[Running] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_module, "FORWARDS_PER_SLICE", 2)
        scheduled(streaming_engine, [Row((3,), PLAIN, 4)], 1, on_turn=turns.append)
    assert [turn.forwards for turn in turns[:2]] == [2, 4]
    assert turns[-1] == Running(0, 0, 0), "it is finished, and no longer running"


@pytest.fixture(scope="module")
def mixed_engine(tiny_model: Transformer) -> Engine:
    return Engine(tiny_model, window_size=4, windows=(0, 4))


@given(requests=st.lists(rows(), min_size=2, max_size=6), data=st.data())
def test_autoregressive_rows_and_windows_run_side_by_side(
    mixed_engine: Engine,
    streaming_engine: Engine,
    autoregressive_engine: Engine,
    requests: list[Row],
    data: st.DataObject,
) -> None:
    mixed, alone = [], []
    for row in requests:
        plain = data.draw(st.booleans())
        mixed.append(dataclasses.replace(row, window=0) if plain else row)
        engine = autoregressive_engine if plain else streaming_engine
        alone.append(run(engine, [mixed[-1]])[0])
    assert scheduled(mixed_engine, mixed, 4)[0] == alone


@given(row=rows(), before=st.integers(0, 6), narrow=st.sampled_from([0, 4]))
def test_a_row_goes_on_token_by_token_from_where_its_window_stood(
    mixed_engine: Engine, autoregressive_engine: Engine, row: Row, before: int, narrow: int
) -> None:
    """The first filled slot is kept, what was filled behind it is forgotten."""
    greedy = dataclasses.replace(row.params, temperature=0.0, stop_token_ids=())
    batch = mixed_engine.start([row.prompt], [greedy], windows=[row.window])
    batch.advance(before)
    batch.set_windows(narrow)
    batch.advance(before)
    result, view = batch.results()[0], batch.window(0)
    known = bool(batch._state.known[0])
    first = [token for token in view.tokens[:1] if token is not None and not known]
    text = [*result.token_ids, *first]
    batch.set_windows(0)
    batch.advance()
    whole = batch.results()[0].token_ids
    left = greedy.max_tokens - len(text)
    if result.finish_reason or 1 in text or left <= 0:
        assert whole == text[: len(whole)]
        return
    rest = dataclasses.replace(greedy, max_tokens=left)
    alone = run(autoregressive_engine, [Row((*row.prompt, *text), rest, 0)])[0]
    assert whole == text + alone.token_ids


def test_shared_counts_equal_first_tokens() -> None:
    assert shared(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert shared(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert shared(np.array([1]), np.array([2])) == 0


def test_the_longest_beginning_is_found_and_short_ones_are_not_worth_it() -> None:
    index = PrefixIndex(3)
    index.hold(0, range(10))
    index.hold(1, [*range(8), 99])
    index.hold(2, range(4))
    prompt = np.array([*range(9), 50])
    assert index.longest(prompt, [0, 1, 2]) == (0, 9)
    assert index.longest(prompt, [1, 2]) == (1, 8)
    assert index.longest(prompt, [2]) == (-1, 0)
    assert index.longest(np.array([99] * 20), [0, 1, 2]) == (-1, 0)


def test_no_more_rows_than_asked_for_and_no_more_than_needed(
    streaming_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    plain = Engine.open

    def noted(engine: Engine, sizes: BatchSizes) -> Batch:
        opened.append(sizes.rows)
        return plain(engine, sizes)

    monkeypatch.setattr(Engine, "open", noted)
    scheduled(streaming_engine, [Row((3 + i, 9), PLAIN, 4) for i in range(7)], 3)
    scheduled(streaming_engine, [Row((3 + i, 9), PLAIN, 4) for i in range(3)], 100)
    assert opened == [3, 4]
