"""What a forward costs: learnt from bursts, and kept."""

import json

import numpy as np
import pytest

from wedlm_jax.engine.costs import CostTable, kept_table

SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.15e-3, 0.21e-3, 0.30e-3, 0.50e-3, 0.90e-3, 1.5e-3, 2.6e-3, 4.0e-3)
OVERHEAD = 4e-4
WRONG = tuple(x * e for x, e in zip(SECONDS, (1.3, 0.8, 0.7, 1.0, 1.3, 0.7, 1.2, 0.8), strict=True))


def ratio(table, tokens, other, *, windowless=False):
    return float(table.seconds(tokens) / table.seconds(other, windowless=windowless))


def true_ratio(tokens, other, windowless=1.0):
    return SECONDS[SIZES.index(tokens)] / (windowless * SECONDS[SIZES.index(other)])


def test_a_forward_costs_what_the_smallest_size_costs_that_holds_it():
    table = CostTable((8, 1, 64), (3.0, 1.0, 5.0), windowless=0.5)
    assert table.seconds(np.array([1, 2, 8, 9, 64])) == pytest.approx([1, 3, 3, 5, 5])
    # More than the largest is computed in parts; what just fits may not fit the next time.
    assert table.seconds(np.array([65, 72, 73, 136])) == pytest.approx([6, 8, 10, 13])
    expected = table.expected(np.array([8.0, 7.0, 8.0]), np.array([0.0, 1.0, 1.0]))
    assert expected == pytest.approx([3, 3, (3 + 3 + 5) / 3])
    # The sizes of another program lie between.
    assert table.of_sizes((1, 8, 64)) == pytest.approx([1, 3, 5])
    assert table.of_sizes((8,), windowless=True) == pytest.approx([1.5])
    assert table.of_sizes((16,)) == pytest.approx([3 + 2 / 3])


class Bursts:
    """Bursts on a machine with true costs, of which a table learns."""

    def __init__(self, table, *, windowless=1.0, seed=0):
        self.table, self.windowless, self.level = table, windowless, 1.0
        self.rng = np.random.default_rng(seed)

    def run(self, size, count=1, *, noise=0.1, outliers=0.0, windowless=False):
        runs = np.where(np.array(SIZES) == size, 32, 0)
        part = self.windowless if windowless else 1.0
        for _ in range(count):
            seconds = self.level * (OVERHEAD + part * float(runs @ SECONDS))
            seconds *= self.rng.uniform(1 - noise, 1 + noise)
            seconds *= 10 if self.rng.random() < outliers else 1
            self.table.learn(SIZES, runs, seconds, windowless=windowless)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_table_is_corrected_by_bursts_of_both_sizes(seed, outliers):
    bursts = Bursts(CostTable(SIZES, WRONG, overhead=OVERHEAD), seed=seed)
    assert ratio(bursts.table, 32, 8) == pytest.approx(true_ratio(32, 8) * 1.3 / 0.7)
    for _ in range(20):
        bursts.run(32, 3, outliers=outliers)
        bursts.run(8, 3, outliers=outliers)
    assert ratio(bursts.table, 32, 8) == pytest.approx(true_ratio(32, 8), rel=0.1)


def test_one_burst_of_a_size_that_never_ran_says_much():
    bursts = Bursts(CostTable(SIZES, WRONG, overhead=OVERHEAD))
    bursts.run(32, 50)
    wrong = ratio(bursts.table, 32, 8) / true_ratio(32, 8)
    bursts.run(8, noise=0.0)
    right = ratio(bursts.table, 32, 8) / true_ratio(32, 8)
    assert wrong > 1.4
    assert abs(np.log(right)) < 0.4 * np.log(wrong)


def test_neighbours_learn_of_each_other_and_far_sizes_do_not():
    table = CostTable(SIZES, SECONDS, overhead=1e-6)
    runs = np.eye(len(SIZES), dtype=int) * 32
    for _ in range(20):
        table.learn(SIZES, runs[0], 32 * SECONDS[0])
        table.learn(SIZES, runs[4], 1.5 * 32 * SECONDS[4])
    assert ratio(table, 32, 1) == pytest.approx(1.5 * true_ratio(32, 1), rel=0.05)
    assert ratio(table, 64, 1) > 1.2 * true_ratio(64, 1)
    assert ratio(table, 4, 1) < 1.2 * true_ratio(4, 1)


def test_a_machine_that_slows_down_changes_no_ratio():
    bursts = Bursts(CostTable(SIZES, SECONDS, overhead=OVERHEAD))
    bursts.run(32, 50)
    bursts.level = 2.0
    bursts.run(32, 200)
    assert ratio(bursts.table, 32, 1) == pytest.approx(true_ratio(32, 1), rel=0.06)
    assert bursts.table.seconds(32.0) == pytest.approx(2 * SECONDS[4], rel=0.15)


def test_a_machine_that_slows_down_little_by_little_changes_no_ratio():
    """Each burst is within the noise of the last, so none looks like other work."""
    bursts = Bursts(CostTable(SIZES, SECONDS, overhead=OVERHEAD))
    for _ in range(100):
        bursts.run(32)
        bursts.level *= 1.02
    assert ratio(bursts.table, 32, 1) == pytest.approx(true_ratio(32, 1), rel=0.1)
    assert bursts.table.seconds(32.0) == pytest.approx(bursts.level * SECONDS[4], rel=0.1)


def test_the_program_without_windows_has_costs_of_its_own():
    bursts = Bursts(CostTable(SIZES, SECONDS, overhead=OVERHEAD), windowless=0.7)
    for _ in range(15):
        bursts.run(32, 2)
        bursts.run(8, 2, windowless=True)
    assert ratio(bursts.table, 32, 8, windowless=True) == pytest.approx(
        true_ratio(32, 8, 0.7), rel=0.08
    )
    # A size nearby follows, more than the same size of the other program.
    near = ratio(bursts.table, 32, 4, windowless=True) / true_ratio(32, 4)
    assert near > ratio(bursts.table, 32, 8) / true_ratio(32, 8) > 1


def test_what_bursts_take_beside_their_forwards_is_told_from_these():
    table = CostTable(SIZES, SECONDS, overhead=OVERHEAD)
    rng = np.random.default_rng(0)
    for _ in range(200):
        count = rng.choice([1, 2, 60])
        runs = np.where(np.array(SIZES) == 8, count, 0)
        table.learn(SIZES, runs, 3e-3 + count * SECONDS[2])
    assert table.overhead == pytest.approx(3e-3, rel=0.1)
    assert table.seconds(8.0) == pytest.approx(SECONDS[2], rel=0.1)


def test_a_host_that_becomes_slower_changes_no_forward():
    """What bursts take in addition may change alone, and is then soon followed."""
    table, rng = CostTable(SIZES, SECONDS, overhead=OVERHEAD), np.random.default_rng(0)
    for overhead in [OVERHEAD] * 300 + [3 * OVERHEAD] * 10:
        for count in (1, 32):
            runs = np.where(np.array(SIZES) == 1, count, 0)
            seconds = overhead + count * SECONDS[0]
            table.learn(SIZES, runs, seconds * rng.uniform(0.9, 1.1))
    assert table.overhead == pytest.approx(3 * OVERHEAD, rel=0.2)
    assert table.seconds(1.0) == pytest.approx(SECONDS[0], rel=0.1)


def test_a_table_of_nothing_learns_all():
    bursts = Bursts(CostTable(SIZES))
    for _ in range(4):
        for size in SIZES:
            bursts.run(size, noise=0.02)
    found = bursts.table.of_sizes(SIZES)
    assert found / found[0] == pytest.approx(np.array(SECONDS) / SECONDS[0], rel=0.15)


def test_a_table_is_kept_for_the_same_machine_and_model(tmp_path):
    calls = []

    def measured():
        calls.append(1)
        return CostTable(SIZES, SECONDS, windowless=np.linspace(0.7, 0.9, 8).tolist(), overhead=0.1)

    folder, key = tmp_path / "compiled", {"device": "cpu", "sizes": SIZES}
    first = kept_table(folder, key, measured)
    again = kept_table(folder, key, measured)
    assert len(calls) == 1
    for windowless in (False, True):
        assert again.of_sizes(SIZES, windowless=windowless) == pytest.approx(
            first.of_sizes(SIZES, windowless=windowless)
        )
    assert again.overhead == pytest.approx(0.1)
    kept_table(folder, {**key, "device": "tpu"}, measured)
    kept_table(None, key, measured)
    assert len(calls) == 3
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"size": [1]}'])
def test_a_file_that_is_not_whole_is_written_anew(tmp_path, text):
    kept_table(tmp_path, {"a": 1}, lambda: CostTable(SIZES, SECONDS))
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert kept_table(tmp_path, {"a": 1}, lambda: CostTable((1,), (5.0,))).sizes.tolist() == [1]
    assert json.loads(path.read_text())["sizes"] == [1]
    nowhere = kept_table(path, {}, lambda: CostTable(SIZES, SECONDS))
    assert nowhere.sizes.tolist() == list(SIZES), "no folder: kept nowhere"


def test_a_ratio_is_less_doubtful_after_bursts_of_both_programs():
    costs = CostTable([1, 16, 256], [1e-3, 2e-3, 9e-3])
    assert costs.doubt(16, 16, windowless=False) == 0
    before = costs.doubt(200, 16, windowless=True)
    for _ in range(20):  # one program alone cannot tell a ratio from the machine's load
        costs.learn([256], np.array([8]), 0.08)
    alone = costs.doubt(200, 16, windowless=True)
    for _ in range(20):
        costs.learn([256], np.array([8]), 0.08)
        costs.learn([16], np.array([8]), 0.02, windowless=True)
    assert costs.doubt(200, 16, windowless=True) < 0.5 * alone <= 0.5 * before
    assert costs.doubt(10_000, 16, windowless=True) == costs.doubt(256, 16, windowless=True)
