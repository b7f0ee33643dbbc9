"""The window that pays: by what forwards cost, and what they are seen to commit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decode_examples import Row, run
from wedlm_jax.engine import Engine
from wedlm_jax.model import Transformer
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.scheduler import Scheduler
from wedlm_jax.width_policy import MARGIN, PROMISING, TRY_FORWARDS, TRY_SHARE, WidthPolicy

WIDTHS = (0, 4, 8, 16, 32)
SLICE = 64


class Device:
    """A made-up device and text: a policy decodes on it, slice by slice. The first forward after a
    change of width commits nothing.

    Args:
      costs: seconds of a forward for each window.
      commits: tokens that a row commits in a forward.
      noise: slices take up to so many times longer, at random.
    """

    def __init__(self, costs: Sequence[float], commits: Sequence[float], noise: float = 0.0):
        self.costs, self.commits = list(costs), list(commits)
        self._noise, self._rng, self._window = noise, random.Random(0), -1
        self.seconds = self.tokens = 0.0

    def decode(self, policy: WidthPolicy, slices: int) -> list[int]:
        """The windows of so many slices."""
        chosen = []
        for _ in range(slices):
            window = policy.choose()
            at, forwards = WIDTHS.index(window), policy.forwards(SLICE)
            tokens = self.commits[at] * (forwards - (window not in (0, self._window)))
            seconds = forwards * self.costs[at] * (1 + self._noise * self._rng.random())
            policy.observe(
                window, tokens=round(100 * tokens), row_forwards=100 * forwards, forwards=forwards,
                seconds=seconds if policy.is_due(window) else None,
            )  # fmt: skip
            self._window = window
            self.seconds += forwards * self.costs[at]
            self.tokens += tokens
            chosen.append(window)
        return chosen

    def speed(self, window: int) -> float:
        at = WIDTHS.index(window)
        return self.commits[at] / self.costs[at]


WAITING = (1.0, 1.01, 1.02, 1.05, 1.1)
"""A device that waits for memory: wider costs hardly more."""
COMPUTING = (1.0, 5.0, 10.0, 20.0, 40.0)
FILLING = (1, 2.2, 3, 3.5, 4)


def test_the_widest_pays_where_forwards_cost_the_same() -> None:
    chosen = Device(WAITING, FILLING).decode(WidthPolicy(WIDTHS), 100)
    firsts = [chosen.index(window) for window in WIDTHS]
    assert firsts == sorted(firsts), "each has its first try, the narrow ones first"
    assert firsts[-1] < 15
    assert chosen.count(32) > 80


def test_none_pays_where_every_slot_costs() -> None:
    chosen = Device(COMPUTING, FILLING).decode(WidthPolicy(WIDTHS), 300)
    assert set(chosen) == {0, 4}, "wider than a window that does not promise nothing is tried"
    assert chosen.count(4) < 15


def test_tries_take_a_small_share_of_the_time_and_grow_rarer() -> None:
    device, policy = Device((1.0, 2.3, 3.0, 4.0, 6.0), (1, 2.1, 2.6, 2.9, 3)), WidthPolicy(WIDTHS)
    device.decode(policy, 15)
    chosen = device.decode(policy, 2000)
    spent = sum(device.costs[WIDTHS.index(window)] for window in chosen if window) * TRY_FORWARDS
    tries = [i for i, window in enumerate(chosen) if window and not chosen[i - 1]]
    assert 0 < spent < TRY_SHARE * SLICE * len(chosen)
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 8 * gaps[0]


@given(
    costs=st.lists(st.floats(1.0, 3.0), min_size=4, max_size=4),
    commits=st.lists(st.floats(0.9, 1.8), min_size=4, max_size=4),
    noise=st.floats(0.0, 0.3),
)
def test_never_much_slower_than_autoregressive_and_near_the_best(
    costs: list[float], commits: list[float], noise: float
) -> None:
    """Whatever wider windows cost and commit: each costs and commits more than the one before,
    by any factor."""
    costs, commits = [list(accumulate([1.0, *x], mul)) for x in (costs, commits)]
    device, policy = Device(costs, commits, noise), WidthPolicy(WIDTHS)
    device.decode(policy, 60)  # first tries, and time to be sure
    device.seconds = device.tokens = 0.0
    device.decode(policy, 600)
    speed = device.tokens / device.seconds
    assert speed > (1 - TRY_SHARE) * device.speed(0) / (1 + noise)
    reached = [WIDTHS[0]]
    for window in WIDTHS[1:]:
        if device.speed(reached[-1]) < PROMISING * (1 + noise) ** 2 * max(
            map(device.speed, reached)
        ):
            break
        reached.append(window)
    best = max(map(device.speed, reached))
    assert speed > (1 - TRY_SHARE) / MARGIN / (1 + noise) * best


def test_a_text_that_fills_nothing_is_decoded_token_by_token() -> None:
    policy = WidthPolicy(WIDTHS)
    assert Device(WAITING, FILLING).decode(policy, 50)[-1] == 32
    chosen = Device(WAITING, (1, 0.9, 0.9, 0.9, 0.9)).decode(policy, 100)
    assert chosen[60:].count(0) > 30


def test_windows_are_tried_again_and_win_where_the_text_has_changed() -> None:
    policy, costs = WidthPolicy(WIDTHS), (1.0, 2.0, 3.0, 4.0, 5.0)
    assert Device(costs, (1, 1, 1, 1, 1)).decode(policy, 50)[-10:].count(0) >= 8
    assert Device(costs, (1, 4, 5, 9, 9)).decode(policy, 600)[-30:].count(16) >= 26


def test_costs_follow_what_slices_take() -> None:
    policy = WidthPolicy(WIDTHS)
    assert Device(WAITING, FILLING).decode(policy, 40)[-1] == 32
    assert Device(COMPUTING, FILLING).decode(policy, 200)[-1] == 0


@pytest.mark.parametrize("factor", [0.001, 1000.0])
def test_one_odd_slice_changes_little(factor: float) -> None:
    policy = WidthPolicy(WIDTHS)
    Device((1.0, 3.0, 4.0, 5.0, 6.0), FILLING).decode(policy, 50)
    before = policy.rate(0)
    policy.observe(0, tokens=64, row_forwards=64, forwards=64, seconds=64 * factor)
    assert before / 2 < policy.rate(0) < 2 * before


def test_a_window_that_began_badly_is_found_to_be_good() -> None:
    policy, costs = WidthPolicy(WIDTHS), (1.0, 1.05, 1.1, 1.2, 1.3)
    bad = Device((1.0, 1.05, 11.0, 12.0, 13.0), (1, 2, 0.5, 0.5, 0.5))
    assert bad.decode(policy, 12)[-1] == 4
    assert Device(costs, (1, 2, 2.6, 3, 3.4)).decode(policy, 2000)[-1] == 32


def test_a_window_a_little_better_is_chosen() -> None:
    chosen = Device((1.0, 2.0, 4.0, 8.0, 16.0), (1, 2.3, 2.4, 2.5, 2.6)).decode(
        WidthPolicy(WIDTHS), 200
    )
    assert chosen.count(4) > 180


def test_choosing_alone_changes_nothing() -> None:
    one, other = WidthPolicy(WIDTHS), WidthPolicy(WIDTHS)
    costs = (1.0, 2.3, 3.0, 4.0, 6.0)
    expected = Device(costs, FILLING).decode(one, 100)
    device = Device(costs, FILLING)
    for window in expected:
        other.choose()  # at the end of a batch, with nothing left to decode
        assert device.decode(other, 1) == [window]


@pytest.fixture(scope="module")
def auto_engine(tiny_model: Transformer) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wedlm_jax.old_engine.AUTO_WINDOWS", (0, 4))
        patch.setattr("wedlm_jax.old_engine.DEFAULT_WINDOW", 4)
        return Engine(tiny_model, window_size="auto")


@pytest.mark.parametrize("window", [0, 4])
def test_all_rows_are_decoded_at_the_width_that_is_chosen(
    auto_engine: Engine,
    autoregressive_engine: Engine,
    streaming_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
) -> None:
    """An engine that may choose decodes as one of the chosen width does."""
    monkeypatch.setattr(WidthPolicy, "choose", lambda _: window)
    params = SamplingParams(max_tokens=12, entropy_threshold=1.6)
    rows = [Row((3 + i, 9), params, window) for i in range(5)]
    scheduler = Scheduler(auto_engine, [(row.prompt, row.params) for row in rows], rows=2)
    results = dict(item for some in scheduler.run() for item in some)
    engine = streaming_engine if window else autoregressive_engine
    assert [results[i] for i in range(5)] == [run(engine, [row])[0] for row in rows]
