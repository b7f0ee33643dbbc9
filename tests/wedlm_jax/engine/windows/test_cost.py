"""What a forward costs: measured, kept, and corrected while decoding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wedlm_jax.engine.windows.cost import CostTable, kept_table, measure

SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.15e-3, 0.21e-3, 0.30e-3, 0.50e-3, 0.90e-3, 1.5e-3, 2.6e-3, 4.0e-3)
OVERHEAD = 4e-4


def ratio(table: CostTable, tokens: float, other: float) -> float:
    return float(table.seconds(np.array(tokens)) / table.seconds(np.array(other)))


def test_a_forward_costs_what_the_smallest_size_costs_that_holds_it() -> None:
    table = CostTable((8, 1, 64), (3.0, 1.0, 5.0))
    assert table.seconds(np.array([1, 2, 8, 9, 64])) == pytest.approx([1, 3, 3, 5, 5])


def test_more_than_the_largest_size_is_computed_in_parts() -> None:
    table = CostTable((1, 8), (1.0, 3.0))
    assert table.seconds(np.array([9, 16, 17, 24])) == pytest.approx([4, 6, 7, 9])


@given(st.lists(st.floats(1e-5, 1.0), min_size=1, max_size=12))
def test_a_larger_forward_is_never_cheaper(seconds: list[float]) -> None:
    table = CostTable([2**i for i in range(len(seconds))], seconds)
    assert (np.diff(table.measured) >= -1e-12).all()
    geometric = np.exp(np.log(seconds).mean())
    assert np.exp(np.log(table.measured).mean()) == pytest.approx(geometric)


def test_what_just_fits_into_a_size_is_expected_not_to_fit_always() -> None:
    table = CostTable((8, 16), (1.0, 3.0))
    assert float(table.expected(np.array(8.0), np.array(0.0))) == 1
    assert float(table.expected(np.array(7.0), np.array(1.0))) == 1
    assert float(table.expected(np.array(8.0), np.array(1.0))) == pytest.approx((1 + 1 + 3) / 3)


def test_a_measurement_stands_up_to_other_work_on_the_machine() -> None:
    rng = np.random.default_rng(0)
    true = dict(zip(SIZES, SECONDS, strict=True))

    def time_forward(tokens: int) -> float:
        slower = 10.0 if rng.random() < 0.1 else 1.0
        return true[tokens] * slower * rng.uniform(0.9, 1.2)

    table = measure(time_forward, SIZES, clock=lambda: 0.0)
    assert table.seconds(np.array(SIZES)) == pytest.approx(SECONDS, rel=0.25)


def test_what_a_burst_takes_beside_its_forwards_is_kept_with_them(tmp_path: Path) -> None:
    def measured() -> CostTable:
        return measure(lambda size: size / 1000, SIZES, overhead=lambda: 0.002)

    assert kept_table(tmp_path, {}, measured).overhead == 0.002
    assert kept_table(tmp_path, {}, measured).overhead == 0.002
    assert measure(lambda size: size / 1000, SIZES, overhead=lambda: 0.0).overhead > 0


def test_sizes_that_cannot_be_reached_are_expected_from_the_others() -> None:
    asked = set()

    def time_forward(tokens: int) -> float:
        asked.add(tokens)
        return 0.001 + 1e-5 * tokens

    table = measure(time_forward, SIZES, reach=33, clock=lambda: 0.0)
    assert asked == {1, 4, 8, 16, 32, 64}
    assert table.sizes.tolist() == list(SIZES)
    assert table.measured[-2:] == pytest.approx([0.001 + 128e-5, 0.001 + 256e-5], rel=0.02)
    alone = measure(time_forward, (1, 8), reach=1, clock=lambda: 0.0)
    assert alone.measured[1] == pytest.approx(8 * alone.measured[0])


def test_a_slow_machine_is_measured_once() -> None:
    asked: list[int] = []
    now = [0.0]

    def time_forward(tokens: int) -> float:
        asked.append(tokens)
        now[0] += 1.0
        return float(tokens)

    measure(time_forward, (1, 2), clock=lambda: now[0])
    assert asked == [1, 2]


def test_a_table_is_kept_for_the_same_machine_and_model(tmp_path: Path) -> None:
    calls = []

    def measured() -> CostTable:
        calls.append(1)
        return CostTable(SIZES, SECONDS)

    folder, key = tmp_path / "compiled", {"device": "cpu", "sizes": SIZES}
    kept_table(folder, key, measured)
    again = kept_table(folder, key, measured)
    assert len(calls) == 1
    assert again.measured.tolist() == pytest.approx(SECONDS)
    kept_table(folder, {**key, "device": "tpu"}, measured)
    kept_table(None, key, measured)
    assert len(calls) == 3
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', '{"key": {"a": 1}, "sizes": 3}'])
def test_a_file_that_is_not_whole_is_written_anew(tmp_path: Path, text: str) -> None:
    kept_table(tmp_path, {"a": 1}, lambda: CostTable(SIZES, SECONDS))
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert kept_table(tmp_path, {"a": 1}, lambda: CostTable((1,), (5.0,))).sizes.tolist() == [1]
    assert json.loads(path.read_text())["sizes"] == [1]


def test_a_folder_that_cannot_be_written_to_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = kept_table(tmp_path / "file", {}, lambda: CostTable(SIZES, SECONDS))
    assert table.sizes.tolist() == list(SIZES)


class Bursts:
    """Bursts on a machine with these costs, observed by a table that was measured with others."""

    def __init__(self, table: CostTable, true: tuple[float, ...] = SECONDS, seed: int = 0):
        self.table, self.true = table, CostTable(SIZES, true)
        self.rng = np.random.default_rng(seed)
        self.level = 1.0

    def run(self, tokens: float, count: int, noise: float = 0.05, outliers: float = 0.0) -> None:
        for _ in range(count):
            seconds = OVERHEAD + 32 * self.level * float(self.true.seconds(np.array(tokens)))
            seconds *= self.rng.uniform(1 - noise, 1 + noise)
            seconds *= 10 if self.rng.random() < outliers else 1
            self.table.observe(tokens, 0.0, 0.0, 0.0, 32, seconds)


def test_an_error_of_the_measurement_is_corrected_by_bursts_of_both_sizes() -> None:
    wrong = list(SECONDS)
    wrong[4] *= 1.25
    bursts = Bursts(CostTable(SIZES, wrong, OVERHEAD))
    before = ratio(bursts.table, 32, 8)
    for _ in range(20):
        bursts.run(32, 10)
        bursts.run(8, 10)
    true = ratio(bursts.true, 32, 8)
    assert before == pytest.approx(1.25 * true)
    assert ratio(bursts.table, 32, 8) == pytest.approx(true, rel=0.04)


def test_known_forwards_correct_a_measurement_too() -> None:
    """One of 1 token was measured at half its time: of bursts of both sizes in changing shares, the
    ratio is learnt."""
    table = CostTable((1, 16), (0.5, 2.0), overhead=1e-5)
    rng = np.random.default_rng(0)
    for _ in range(1500):
        runs = rng.integers(0, 40, 2) * rng.integers(0, 2, 2)
        table.learn((1, 16), runs, float(runs @ [1.0, 2.0]) + 1e-5)
    one, many = table.seconds(np.array([1, 16]))
    assert many / one == pytest.approx(2.0, rel=0.15)
    table.learn((1, 16), np.zeros(2, int), 1.0)  # nothing ran: nothing is learnt
    assert table.seconds(np.array([1])) == one


def test_chunks_of_prompts_are_told_from_the_forwards_behind_them() -> None:
    table = CostTable(SIZES, SECONDS, OVERHEAD)
    before = table.seconds(np.array(SIZES))
    forwards, chunk = 31 * SECONDS[0], SECONDS[4]
    for _ in range(50):
        table.observe(1.0, 0.0, 28.0, 1.0, 32, OVERHEAD + forwards + chunk)
    assert table.seconds(np.array(SIZES)) == pytest.approx(before, rel=0.02)


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    bursts = Bursts(CostTable(SIZES, SECONDS, OVERHEAD))
    bursts.run(32, 50)
    before = ratio(bursts.table, 32, 1)
    bursts.level = 1.6
    bursts.run(32, 200)
    assert ratio(bursts.table, 32, 1) == pytest.approx(before, rel=0.05)


def test_times_that_are_far_too_long_say_little() -> None:
    bursts = Bursts(CostTable(SIZES, SECONDS, OVERHEAD))
    for _ in range(20):
        bursts.run(32, 10, noise=0.3, outliers=0.05)
        bursts.run(8, 10, noise=0.3, outliers=0.05)
    assert ratio(bursts.table, 32, 8) == pytest.approx(ratio(bursts.true, 32, 8), rel=0.08)


def test_the_time_to_compile_changes_nothing() -> None:
    bursts = Bursts(CostTable(SIZES, SECONDS, OVERHEAD))
    bursts.run(8, 20)
    before = ratio(bursts.table, 32, 8)
    bursts.table.observe(32.0, 0.0, 0.0, 0.0, 32, 20.0)
    assert ratio(bursts.table, 32, 8) == pytest.approx(before, rel=0.05)


def test_forwards_without_windows_are_measured_beside_and_followed() -> None:
    """Their program is faster by a share: measured, kept in a file, corrected while decoding."""
    true = dict(zip(SIZES, SECONDS, strict=True))

    def time_windowless() -> float:
        return 0.8 * true[8]

    table = measure(
        lambda tokens: 0.8 * true[1] if tokens == 1 else true[tokens],
        SIZES,
        clock=lambda: 0.0,
        windowless=time_windowless,
        beside=8,
    )
    assert table.windowless == pytest.approx(0.8)
    # One token never has a window: what was timed of it was the faster program.
    plain = measure(true.__getitem__, SIZES, clock=lambda: 0.0)
    assert table.measured == pytest.approx(plain.measured)
    for _ in range(200):
        table.observe(8, 0.0, 0, 0, 100, OVERHEAD + 100 * 0.9 * true[8], windowless=True)
        table.observe(16, 0.0, 0, 0, 100, OVERHEAD + 100 * true[16])
    assert ratio(table, 16, 8) / table.windowless == pytest.approx(
        true[16] / true[8] / 0.9, rel=0.06
    )
