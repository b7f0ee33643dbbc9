"""Rows to the engine and back: numbered over all lists, summed over all lists."""

from __future__ import annotations

from typing import Any

import pytest

from infer.job.engine_feed import completions
from tests.infer.job.quick_decoder import quick_completion
from wedlm_jax.llm import Progress
from wedlm_jax.sampling import SamplingParams

ROWS: list[Any] = [([i, i + 1], SamplingParams(max_tokens=5)) for i in range(23)]


class Engine:
    """Takes lists, and gives batches of two, the last first."""

    def __init__(self) -> None:
        self.lists: list[int] = []

    def run(self, rows: Any, on_progress: Any) -> Any:
        assert isinstance(rows, list)
        self.lists.append(len(rows))
        places = list(range(len(rows)))[::-1]
        for done in range(0, len(rows), 2):
            finished = min(done + 2, len(rows))
            on_progress(Progress(finished, len(rows), 10 * finished, 3 * finished))
            yield [(i, quick_completion(rows[i])) for i in places[done : done + 2]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr("infer.job.engine_feed.ROWS_AT_A_TIME", 10)
    return Engine()


def test_every_row_comes_back_under_its_number(engine: Any) -> None:
    told: list[Progress] = []
    done = dict(
        pair for batch in completions(engine, iter(ROWS), told.append, lambda: False)
        for pair in batch
    )  # fmt: skip
    assert engine.lists == [10, 10, 3]
    assert done == {i: quick_completion(row) for i, row in enumerate(ROWS)}
    assert [now.finished for now in told] == [*range(2, 22, 2), 22, 23]
    assert (told[-1].tokens, told[-1].forwards) == (230, 69)


def test_rows_are_asked_for_as_they_are_needed(engine: Any) -> None:
    asked_for: list[int] = []

    def rows() -> Any:
        for i, row in enumerate(ROWS):
            asked_for.append(i)
            yield row

    for _ in completions(engine, rows(), lambda _: None, lambda: False):
        assert len(asked_for) == 10
        break


def test_nothing_is_begun_once_the_job_is_stopping(engine: Any) -> None:
    batches = list(completions(engine, iter(ROWS), lambda _: None, lambda: True))
    assert len(batches) == 1, "what was under way comes back"
    assert engine.lists == [10]
