"""The order in which steps read rows: a function of seed and step, whoever reads."""

from collections import Counter

import numpy as np
import pytest

from tests.examples.data import NumberedRows
from train.data.order import StepRows, read_ahead
from wedlm_jax.errors import InputError

A, R = 2, 3


def steps_of(*sets, seed=4, shape=(A, R)):
    return StepRows(sets, seed=seed, shape=shape)


def numbers(steps, step, rows=range(R)):
    return steps.read(step, rows)["tokens"][..., 0]


def test_a_batch_is_accumulation_by_rows_of_whole_rows():
    batch = steps_of((NumberedRows(20), 1.0)).read(0, range(R))
    assert batch["tokens"].shape == (A, R, 4)
    assert (batch["tokens"] == batch["tokens"][..., :1]).all()
    np.testing.assert_array_equal(batch["segment_ids"], batch["tokens"] * 2)


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order():
    steps = steps_of((NumberedRows(24), 1.0))
    epochs = [
        np.concatenate([numbers(steps, step).reshape(-1) for step in epoch])
        for epoch in (range(4), range(4, 8))
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
        assert list(epoch) != sorted(epoch)
    assert list(epochs[0]) != list(epochs[1])


def test_the_seed_decides_the_order():
    here, there = (numbers(steps_of((NumberedRows(24), 1.0), seed=seed), 0) for seed in (4, 5))
    assert not np.array_equal(here, there)


def test_accumulation_splits_the_same_global_batch():
    split, at_once = (
        numbers(steps_of((NumberedRows(24), 1.0), shape=shape), 1, range(shape[1]))
        for shape in ((2, 3), (1, 6))
    )
    np.testing.assert_array_equal(split.reshape(-1), at_once.reshape(-1))


def test_the_places_of_a_steps_rows_are_told_without_reading_them():
    sets = ((NumberedRows(20), 0.7), (NumberedRows(9, first=100), 0.3))
    steps = steps_of(*sets)
    for step in (0, 3, 11):
        places = steps.places(step)
        told = [[int(file.split()[1]) + number for file, number in turn] for turn in places]
        np.testing.assert_array_equal(told, numbers(steps, step))


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(InputError, match="5 packed rows are fewer than one batch of 6"):
        steps_of((NumberedRows(3), 1.0), (NumberedRows(2), 1.0))
    assert numbers(steps_of((NumberedRows(6), 1.0)), 3).shape == (A, R)


def test_weights_are_shares_of_every_stretch_and_each_source_has_epochs_of_its_own():
    sets = (
        (NumberedRows(500), 6.0),
        (NumberedRows(50, first=1000), 3.0),
        (NumberedRows(900, first=2000), 1.0),
    )
    read = numbers(steps_of(*sets, shape=(1, 400)), 0, range(400))[0].tolist()
    for stretch in (read[:100], read[250:350], read):
        sources = Counter(n // 1000 for n in stretch)
        for source, share in enumerate((0.6, 0.3, 0.1)):
            assert sources[source] / len(stretch) == pytest.approx(share, abs=0.02)
    small = [n for n in read if n // 1000 == 1]
    for epoch in range(len(small) // 50):
        assert sorted(small[50 * epoch :][:50]) == list(range(1000, 1050))
    assert max(Counter(n for n in read if n // 1000 != 1).values()) == 1


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_together_read_the_global_batch(hosts):
    steps, share = steps_of((NumberedRows(40), 1.0), shape=(2, 8)), 8 // hosts
    parts = [numbers(steps, 4, range(h * share, (h + 1) * share)) for h in range(hosts)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), numbers(steps, 4, range(8)))


def test_reading_ahead_keeps_the_order():
    steps = steps_of((NumberedRows(30), 1.0))
    read = list(read_ahead(steps, [0, 2], 5, 25, workers=0, prefetch=3))
    assert len(read) == 20
    for step, batch in enumerate(read, 5):
        np.testing.assert_array_equal(batch["tokens"][..., 0], numbers(steps, step, [0, 2]))


def test_a_seed_gives_the_order_that_it_always_gave():
    """With another order, a resumed run would read other rows than it would have without a stop."""
    sets = ((NumberedRows(20), 0.7), (NumberedRows(9, first=100), 0.3))
    steps = steps_of(*sets)
    assert [numbers(steps, step).tolist() for step in (0, 9)] == [
        [[0, 2, 7], [103, 6, 11]],
        [[12, 9, 103], [13, 8, 102]],
    ]
