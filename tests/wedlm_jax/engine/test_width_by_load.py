"""The best windows for sequences that decode together, against trying all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wedlm_jax.engine.simulated_decoding import CPU_COSTS, TPU_COSTS
from wedlm_jax.engine.acceptance import Family
from wedlm_jax.engine.cost import CostTable
from wedlm_jax.engine.width_by_load import Load, WidthsByLoad, window_tokens

WIDTHS = np.array([0, 2, 4, 8, 16, 32])
FAMILY = Family(WIDTHS).expected
FILLED = 1 + WIDTHS / 64.0


def table(costs: dict[int, float]) -> CostTable:
    return CostTable(list(costs), [cost / 1000 for cost in costs.values()])


def choice(types: list[int], costs: CostTable, hoped: float = 1.0) -> WidthsByLoad:
    committed = FAMILY[types].copy()
    filled = np.broadcast_to(FILLED, committed.shape)
    wide = np.minimum(hoped * committed, np.maximum(WIDTHS, 1))
    return WidthsByLoad(
        Load(committed, WIDTHS, filled),
        Load(wide, WIDTHS, filled),
        base_committed=0.0,
        base_tokens=np.zeros(4),
        costs=costs,
    )


def speed(types: list[int], columns: tuple[int, ...], costs: CostTable) -> float:
    """Tokens a second, written down plainly."""
    committed, tokens = 0.0, np.zeros(4)
    for one, column in zip(types, columns, strict=True):
        own = FAMILY[one, column] if column else 1.0
        committed += own
        tokens += window_tokens(WIDTHS[column : column + 1], FILLED[column] * np.array([own]))[:, 0]
    return committed / float(costs.expected(tokens))


@settings(max_examples=40, deadline=None)
@given(
    types=st.lists(st.integers(0, len(FAMILY) - 1), min_size=1, max_size=4),
    costs=st.sampled_from([CPU_COSTS, TPU_COSTS]),
)
def test_the_choice_is_the_best_of_all_or_nearly(types: list[int], costs: dict[int, float]) -> None:
    """On a CPU sizes of forwards are steps, over which prices do not look: 6 %."""
    costs_table = table(costs)
    columns, _ = choice(types, costs_table).best(np.full(len(types), -1))
    every = itertools.product(range(len(WIDTHS)), repeat=len(types))
    best = max(speed(types, each, costs_table) for each in every)
    assert speed(types, tuple(columns.tolist()), costs_table) >= 0.94 * best


def test_easy_sequences_get_wider_windows_than_hard_ones() -> None:
    costs = CostTable([4**i for i in range(8)], [1 + 0.001 * 4**i for i in range(8)])
    columns, price = choice([1] * 64 + [12] * 64, costs).best(np.full(128, -1))
    assert columns[:64].max() < columns[64:].min()
    assert price is not None


def test_a_window_is_kept_unless_another_is_clearly_better() -> None:
    flat = CostTable((1, 64), (1.0, 1.0))
    one = choice([4], flat)
    assert WIDTHS[one.best(np.array([-1]))[0][0]] == 32
    close = int(np.flatnonzero(FAMILY[4] * 1.015 > FAMILY[4, 5])[0])
    assert one.best(np.array([close]))[0][0] == close
    assert one.best(np.array([1]))[0][0] == 5


def test_windows_of_requests_that_name_one_count_as_load() -> None:
    steep = CostTable([2**i for i in range(12)], [1.0] * 6 + [10.0] * 6)
    committed = FAMILY[[10]].copy()
    filled = np.broadcast_to(FILLED, committed.shape)

    def alone_or_beside(tokens: float) -> int:
        load = Load(committed.copy(), WIDTHS, filled)
        base = np.array([tokens, 0.0, tokens, tokens])
        found = WidthsByLoad(load, load, base_committed=0, base_tokens=base, costs=steep)
        return int(WIDTHS[found.best(np.array([-1]))[0][0]])

    assert alone_or_beside(0) == 16
    assert alone_or_beside(20) < 8


def test_new_sequences_get_what_such_ones_pay_for() -> None:
    costs = table(TPU_COSTS)
    types = [1] * 64 + [12] * 64
    both = choice(types, costs)
    columns, price = both.best(np.full(128, -1))
    for one, expected in ((1, columns[0]), (12, columns[-1])):
        unknown = Load(FAMILY[[one]].copy(), WIDTHS, FILLED[None])
        assert both.usual(unknown, columns, price) == expected
    alone = choice([1], costs)
    unknown = Load(FAMILY[[12]].copy(), WIDTHS, FILLED[None])
    assert WIDTHS[alone.usual(unknown, np.array([0]), None)] >= 16


@pytest.mark.parametrize("count", [1, 8])
def test_nothing_is_tried_where_nothing_can_be_hoped_for(count: int) -> None:
    """Where a forward costs as much as its tokens, no window pays: it commits less than it
    computes."""
    linear = CostTable([2**i for i in range(14)], [2.0**i for i in range(14)])
    one = choice([15] * count, linear, hoped=10)
    columns, _ = one.best(np.full(count, -1))
    assert not columns.any()
    assert one.attempt(columns, 0) is None


def test_a_try_is_of_one_sequence_where_it_costs_much_and_of_all_where_it_costs_little() -> None:
    costs = table(CPU_COSTS)
    hard = choice([0] * 2, costs, hoped=12)
    columns, _ = hard.best(np.full(2, -1))
    tried = hard.attempt(columns, 1)
    assert tried is not None
    assert np.flatnonzero(tried[0] != columns).tolist() == [1]
    assert 0 < tried[1] < 1
    flat = choice([8] * 8, table(TPU_COSTS), hoped=1.08)
    columns, _ = flat.best(np.full(8, -1))
    tried = flat.attempt(columns, 3)
    assert tried is not None
    assert (tried[0] != columns).all()
    assert tried[1] < 0.1
