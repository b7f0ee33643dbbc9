"""Prompts of several lengths: who decodes with whom changes no token, and takes no more memory
than it may."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decode_examples import Row, rows, run
from wedlm_jax import length_classes as classes_module
from wedlm_jax import scheduler as scheduler_module
from wedlm_jax.batch import Batch
from wedlm_jax.batch_sizes import BatchSizes, cache_needed
from wedlm_jax.engine import Engine
from wedlm_jax.length_classes import LengthClass, class_of, engine_classes, length_classes
from wedlm_jax.model import Transformer
from wedlm_jax.row_result import RowResult
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.scheduler import Scheduler

SHORT = SamplingParams(max_tokens=4, entropy_threshold=1.6)
LONG = dataclasses.replace(SHORT, max_tokens=20)


@pytest.fixture(autouse=True, scope="module")
def small_classes() -> Iterator[None]:
    """The tiny model's 48 tokens are then several classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes_module, "SMALLEST_CLASS", 32)
        patch.setattr("wedlm_jax.batch_sizes.SMALLEST_PROMPT_BUCKET", 8)
        patch.setattr("wedlm_jax.prefix.SHORTEST_PREFIX", 6)
        yield


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and cache size of every batch, as it is opened."""
    sizes: list[tuple[int, int]] = []
    plain = Engine.open

    def noted(engine: Engine, wanted: BatchSizes) -> Batch:
        sizes.append((wanted.rows, wanted.cache_size))
        return plain(engine, wanted)

    monkeypatch.setattr(Engine, "open", noted)
    return sizes


def scheduled(engine: Engine, requests: list[Row], slots: int, tokens: int) -> list[RowResult]:
    scheduler = Scheduler(
        engine, iter([(row.prompt, row.params) for row in requests]), rows=slots,
        window_of=lambda number: requests[number].window, max_cache_tokens=tokens,
    )  # fmt: skip
    results = dict(item for some in scheduler.run() for item in some)
    assert len(results) == len(requests), "each of them once"
    return [results[number] for number in range(len(requests))]


def short(count: int) -> list[Row]:
    return [Row((2, 3, 4, 5, 6, 7, 3 + i % 20), SHORT, 4) for i in range(count)]


def long(count: int) -> list[Row]:
    return [Row((*range(2, 22), 3 + i % 20), LONG, 4) for i in range(count)]


@given(requests=st.lists(rows(), min_size=1, max_size=12), slots=st.sampled_from([1, 2, 4]))
def test_a_request_gets_what_it_gets_alone(
    streaming_engine: Engine, requests: list[Row], slots: int
) -> None:
    alone = [run(streaming_engine, [row])[0] for row in requests]
    assert scheduled(streaming_engine, requests, slots, 128) == alone


def test_short_and_long_prompts_decode_apart(
    streaming_engine: Engine, opened: list[tuple[int, int]]
) -> None:
    requests = [row for pair in zip(short(20), long(20), strict=True) for row in pair]
    alone = [run(streaming_engine, [row])[0] for row in requests]
    opened.clear()
    assert scheduled(streaming_engine, requests, 4, 128) == alone
    assert opened == [(2, 64), (4, 32)], "the longer queue first"


def test_a_rare_long_prompt_waits_for_others_of_its_kind(
    streaming_engine: Engine, opened: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "LOOKAHEAD", 24)
    requests = short(60)
    for place, row in zip((2, 20, 40), long(3), strict=True):
        requests.insert(place, row)
    scheduled(streaming_engine, requests, 4, 128)
    assert opened == [(4, 32), (2, 64)]


def test_in_an_endless_stream_no_length_waits_for_ever(
    streaming_engine: Engine, opened: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long prompt in four, ten times as many as are read ahead."""
    monkeypatch.setattr(scheduler_module, "LOOKAHEAD", 24)
    requests = short(180)
    requests = [row for i in range(60) for row in (long(60)[i], *requests[3 * i : 3 * i + 3])]
    read = 0

    def stream() -> Iterator[tuple[tuple[int, ...], SamplingParams]]:
        nonlocal read
        for row in requests:
            read += 1
            yield row.prompt, row.params

    delays = []
    for some in Scheduler(streaming_engine, stream(), rows=4, max_cache_tokens=128).run():
        delays += [read - number for number, _ in some]
    assert len(delays) == 240
    assert max(delays) <= 100, "prompts read before the last of those that came with it is done"
    # By turns, and many of one length before the other is given a batch again.
    assert 8 < len(opened) <= 30
    for before, after in itertools.pairwise(opened[:-1]):
        assert {before, after} == {(4, 32), (2, 64)}


def test_short_prompts_take_the_rows_that_long_ones_leave(
    streaming_engine: Engine, opened: list[tuple[int, int]]
) -> None:
    requests = [*long(1), *short(1)]
    alone = [run(streaming_engine, [row])[0] for row in requests]
    opened.clear()
    assert scheduled(streaming_engine, requests, 4, 128) == alone
    assert opened == [(2, 64)]


def test_without_a_limit_there_is_one_kind_of_batch(
    streaming_engine: Engine, opened: list[tuple[int, int]]
) -> None:
    requests = [(row.prompt, row.params) for row in (*short(3), *long(3))]
    for _ in Scheduler(streaming_engine, requests, rows=4).run():
        pass
    assert opened == [(4, 64)]


@pytest.mark.parametrize(("window", "sizes"), [(12, [32, 64, 96]), (16, [64, 96])])
def test_the_shortest_class_holds_a_prompt_of_any_window(
    tiny_model: Transformer, window: int, sizes: list[int]
) -> None:
    engine = Engine(tiny_model, window_size=window)
    classes = engine_classes(engine, 8, 192)
    assert [each.cache_size for each in classes] == sizes
    assert cache_needed(engine, [2], SHORT) <= sizes[0]


def test_rows_halve_where_lengths_double() -> None:
    assert length_classes(32, 3072, 32768) == (
        LengthClass(1024, 32), LengthClass(2048, 16), LengthClass(3072, 10),
    )  # fmt: skip
    assert length_classes(32, 3072) == (LengthClass(None, 32),), "one, as long as need be"
    assert length_classes(4, 64, 10**6) == (LengthClass(None, 4),)


@given(
    rows=st.integers(1, 300), largest=st.integers(32, 10**5), spare=st.integers(0, 10**6),
    shards=st.sampled_from([1, 2, 8]),
)  # fmt: skip
def test_classes_grow_and_keep_within_the_limit(
    rows: int, largest: int, spare: int, shards: int
) -> None:
    limit = shards * largest + spare
    classes = length_classes(rows, largest, limit, multiple=shards)
    sizes = [each.cache_size or largest for each in classes]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert (classes[0].cache_size is None) == (len(classes) == 1)
    for each, size in zip(classes, sizes, strict=True):
        assert shards <= each.rows < rows + shards
        assert each.rows % shards == 0
        assert each.rows * size <= limit
    for size in (1, largest // 2, largest):
        chosen = class_of(size, classes)
        assert size <= sizes[chosen]
        assert chosen == 0 or size > sizes[chosen - 1]
    if len(classes) > 1:
        with pytest.raises(ValueError, match="more than"):
            class_of(largest + 1, classes)
