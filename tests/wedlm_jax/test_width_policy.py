"""The window that pays: by what forwards cost, and what they are seen to commit."""

from __future__ import annotations

import pytest

from tests.decode_examples import Row, run
from wedlm_jax import width_policy
from wedlm_jax.batch_sizes import BatchSizes
from wedlm_jax.engine import Engine
from wedlm_jax.model import Transformer
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.scheduler import Scheduler
from wedlm_jax.width_policy import (
    TRY_FORWARDS,
    TRY_SHARE,
    WidthPolicy,
    expected_tokens,
    measure_costs,
)

WAITING = {0: 1.0, 4: 1.01, 16: 1.05, 32: 1.1}
"""A device that waits for memory: wider costs hardly more."""
COMPUTING = {0: 1.0, 4: 5.0, 16: 20.0, 32: 40.0}


def slices(policy: WidthPolicy, commits: dict[int, float], count: int) -> list[int]:
    """The windows of so many slices of 64 forwards, in which a row commits this much a forward."""
    chosen = []
    for _ in range(count):
        window = policy.choose()
        chosen.append(window)
        forwards = policy.forwards(64)
        policy.observe(
            window, tokens=round(commits[window] * 1000), row_forwards=1000, forwards=forwards,
            seconds=None,
        )  # fmt: skip
    return chosen


def test_the_widest_pays_where_forwards_cost_the_same() -> None:
    chosen = slices(WidthPolicy(WAITING), {0: 1, 4: 2, 16: 3, 32: 4}, 100)
    assert chosen.count(32) > 60
    assert chosen[:3] == [32] * 3


def test_none_pays_where_every_slot_costs() -> None:
    chosen = slices(WidthPolicy(COMPUTING), {0: 1, 4: 2, 16: 3, 32: 4}, 100)
    assert set(chosen) == {0, 4}, "the most promising of the windows is tried"
    assert chosen.count(4) < 10


@pytest.mark.parametrize("costs", [WAITING, COMPUTING])
def test_tries_take_a_small_share_of_the_time(costs: dict[int, float]) -> None:
    policy = WidthPolicy(costs)
    best = policy.choose()
    spent = {True: 0.0, False: 0.0}
    for window in slices(policy, {0: 1, 4: 2.1, 16: 3.2, 32: 4}, 400):
        spent[window == best] += costs[window] * (64 if window == best else TRY_FORWARDS)
    assert 0 < spent[False] <= TRY_SHARE * sum(spent.values())


def test_a_text_that_fills_nothing_is_decoded_token_by_token() -> None:
    chosen = slices(WidthPolicy(WAITING), {0: 1, 4: 0.9, 16: 0.9, 32: 0.9}, 100)
    assert chosen[0] == 32
    assert chosen[60:].count(0) > 30


def test_a_window_that_is_better_than_expected_is_found() -> None:
    costs = {0: 1.0, 4: 2.2, 8: 2.6, 16: 3.4}
    chosen = slices(WidthPolicy(costs), {0: 1, 4: 3.5, 8: 3.6, 16: 3.7}, 100)
    assert chosen[0] == 0
    assert chosen[-30:].count(4) > 20


def test_windows_are_tried_again_and_win_where_the_text_has_changed() -> None:
    policy = WidthPolicy({0: 1.0, 16: 3.0})
    assert slices(policy, {0: 1, 16: 1}, 50)[-10:].count(0) >= 8
    # One slice in eight at most may look whether that is still so.
    assert slices(policy, {0: 1, 16: 9}, 300)[-30:].count(16) >= 26


def test_costs_follow_what_slices_take() -> None:
    policy = WidthPolicy({0: 1.0, 16: 1.0})
    assert policy.choose() == 16
    for _ in range(20):
        policy.observe(16, tokens=2, row_forwards=1, forwards=1, seconds=5.0)
    assert policy.choose() == 0


def test_more_is_expected_of_wider_windows() -> None:
    expected = [expected_tokens(window) for window in (0, 1, 2, 4, 8, 16, 32)]
    assert expected[0] == 1
    assert expected == sorted(expected)


@pytest.fixture(scope="module")
def auto_engine(tiny_model: Transformer) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wedlm_jax.engine.AUTO_WINDOWS", (0, 4))
        patch.setattr("wedlm_jax.engine.DEFAULT_WINDOW", 4)
        return Engine(tiny_model, window_size="auto")


def test_costs_are_measured_on_free_rows_and_leave_them_free(auto_engine: Engine) -> None:
    batch = auto_engine.open(BatchSizes(rows=2, cache_size=64, max_output=32, num_stops=4))
    costs = measure_costs(batch)
    assert set(costs) == {0, 4}
    assert all(cost > 0 for cost in costs.values())
    assert batch.look().done.all()


@pytest.mark.parametrize("cheap", [0, 4])
def test_all_rows_are_decoded_at_the_width_that_is_chosen(
    auto_engine: Engine,
    autoregressive_engine: Engine,
    streaming_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    cheap: int,
) -> None:
    """With a clear winner an engine that may choose decodes as one of that width does."""
    costs = {0: 100.0, 4: 100.0, cheap: 1.0}
    monkeypatch.setattr(auto_engine, "_policies", {})
    monkeypatch.setattr(WidthPolicy, "__init__", _with_costs(costs))
    monkeypatch.setattr(width_policy, "TRY_SHARE", 0.0)
    params = SamplingParams(max_tokens=12, entropy_threshold=1.6)
    rows = [Row((3 + i, 9), params, cheap) for i in range(5)]
    scheduler = Scheduler(auto_engine, [(row.prompt, row.params) for row in rows], rows=2)
    results = dict(item for some in scheduler.run() for item in some)
    engine = streaming_engine if cheap else autoregressive_engine
    assert [results[i] for i in range(5)] == [run(engine, [row])[0] for row in rows]


def _with_costs(costs: dict[int, float]):  # type: ignore[no-untyped-def]
    plain = WidthPolicy.__init__

    def fixed(self: WidthPolicy, _: dict[int, float]) -> None:
        plain(self, costs)
        self.observe = lambda *args, **kwargs: None  # type: ignore[method-assign]

    return fixed
