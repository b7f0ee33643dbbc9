"""The order in which steps read rows: a function of seed and step, whoever reads."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import grain
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.examples.data import EMBEDDED, NumberedRows
from train.data.order import HostSteps, global_order, read_ahead, step_places
from train.data.synthetic import build_dataset
from train.recipe.config import load_config
from wedlm_jax.errors import InputError

RECIPES = Path(__file__).parents[3] / "configs"
A, R = 2, 3


def order_of(*sets: tuple[NumberedRows, float], seed: int = 4) -> grain.MapDataset:
    return global_order(sets, seed=seed, batch_rows=A * R)


def whole(order: grain.MapDataset, shape: tuple[int, int] = (A, R), start: int = 0) -> HostSteps:
    return HostSteps(order, shape, range(shape[1]), start, 100)


def numbers(batch: dict[str, np.ndarray]) -> np.ndarray:
    return batch["tokens"][..., 0]


def test_a_batch_is_accumulation_by_rows_of_whole_rows() -> None:
    batch = whole(order_of((NumberedRows(20), 1.0)))[0]
    assert batch["tokens"].shape == (A, R, 4)
    assert (batch["tokens"] == batch["tokens"][..., :1]).all()
    np.testing.assert_array_equal(batch["segment_ids"], batch["tokens"] * 2)


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order() -> None:
    steps = whole(order_of((NumberedRows(24), 1.0)))
    epochs = [
        np.concatenate([numbers(steps[step]).reshape(-1) for step in epoch])
        for epoch in (range(4), range(4, 8))
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
        assert list(epoch) != sorted(epoch)
    assert list(epochs[0]) != list(epochs[1])


@pytest.mark.parametrize("start", [1, 3, 8, 50])
def test_a_step_reads_the_same_rows_wherever_the_run_began(start: int) -> None:
    sets = ((NumberedRows(20), 0.7), (NumberedRows(9, first=100), 0.3))
    from_zero, resumed = whole(order_of(*sets)), whole(order_of(*sets), start=start)
    for step in (0, 1, 7):
        np.testing.assert_array_equal(numbers(resumed[step]), numbers(from_zero[start + step]))
    assert len(resumed) == 100 - start


def test_the_seed_decides_the_order() -> None:
    here, there = (
        numbers(whole(order_of((NumberedRows(24), 1.0), seed=seed))[0]) for seed in (4, 5)
    )
    assert not np.array_equal(here, there)


def test_accumulation_splits_the_same_global_batch() -> None:
    order = order_of((NumberedRows(24), 1.0))
    split, at_once = (numbers(whole(order, shape)[1]) for shape in ((2, 3), (1, 6)))
    np.testing.assert_array_equal(split.reshape(-1), at_once.reshape(-1))


def test_the_places_of_a_steps_rows_are_told_without_reading_them() -> None:
    sets = ((NumberedRows(20), 0.7), (NumberedRows(9, first=100), 0.3))
    read = whole(order_of(*sets))
    for step in (0, 3, 11):
        places = step_places(sets, seed=4, shape=(A, R), batch=step)
        told = [[int(file.split()[1]) + number for file, number in turn] for turn in places]
        np.testing.assert_array_equal(told, numbers(read[step]))


def test_fewer_rows_than_a_batch_are_refused() -> None:
    with pytest.raises(InputError, match="5 packed rows are fewer than one batch of 6"):
        order_of((NumberedRows(3), 1.0), (NumberedRows(2), 1.0))
    assert numbers(whole(order_of((NumberedRows(6), 1.0)))[3]).shape == (A, R)


def test_weights_are_shares_of_every_stretch_and_each_source_has_epochs_of_its_own() -> None:
    sets = (
        (NumberedRows(500), 6.0),
        (NumberedRows(50, first=1000), 3.0),
        (NumberedRows(900, first=2000), 1.0),
    )
    order = order_of(*sets)
    read = [int(order[i]["tokens"][0]) for i in range(400)]
    for stretch in (read[:100], read[250:350], read):
        sources = Counter(n // 1000 for n in stretch)
        for source, share in enumerate((0.6, 0.3, 0.1)):
            assert sources[source] / len(stretch) == pytest.approx(share, abs=0.02)
    small = [n for n in read if n // 1000 == 1]
    for epoch in range(len(small) // 50):
        assert sorted(small[50 * epoch :][:50]) == list(range(1000, 1050))
    assert max(Counter(n for n in read if n // 1000 != 1).values()) == 1


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_together_read_the_global_batch(hosts: int) -> None:
    order = global_order([(NumberedRows(40), 1.0)], seed=1, batch_rows=16)
    expected = numbers(HostSteps(order, (2, 8), range(8), 0, 9)[4])
    share = 8 // hosts
    parts = [
        numbers(HostSteps(order, (2, 8), range(h * share, (h + 1) * share), 4, 9)[0])
        for h in range(hosts)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)


def test_reading_ahead_keeps_the_order() -> None:
    steps = HostSteps(order_of((NumberedRows(30), 1.0)), (A, R), [0, 2], 5, 25)
    read = list(read_ahead(steps, workers=0, prefetch=3))
    assert len(read) == 20
    for number, batch in enumerate(read):
        np.testing.assert_array_equal(numbers(batch), numbers(steps[number]))


PINNED = {
    "embedded_ar": "4d891b2a337ea056f436ebe82680ae457aa966d54e10c7726f7adef980bdc361",
    "embedded_wedlm": "20b0d1115ecb3adeaf9790fd9fc32f7f5f69a482976c09d6a6824f0957f9e18f",
    "embedded_words": "49051f52f35961235955a3745c774b0d39f06852cef387102b625cf7dbd53940",
}


def tokenizer_of(recipe: str) -> Tokenizer:
    """The embedded model's; of the stages before the last without the words that it was given
    there."""
    content = json.loads((EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    if recipe != "embedded_words":
        size = load_config(RECIPES / "embedded_ar.yaml").data.vocab_size
        vocabulary = content["model"]["vocab"]
        content["model"]["vocab"] = {token: i for token, i in vocabulary.items() if i < size}
        content["model"]["ignore_merges"] = False
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("recipe", PINNED)
def test_the_recipes_of_the_embedded_model_read_the_rows_they_always_read(recipe: str) -> None:
    config = load_config(RECIPES / f"{recipe}.yaml", ["data.samples=400"])
    tokenizer = tokenizer_of(recipe)
    dataset = build_dataset(config, tokenizer, 0, report=lambda _: None)
    order = global_order(dataset.row_sets(), seed=config.seed, batch_rows=config.rows)
    steps = whole(order, (1, config.rows))
    epoch = len(dataset.arrays["tokens"]) // config.rows
    digest = hashlib.sha256()
    for step in (0, 1, 2, epoch, epoch + 1, 3 * epoch):
        for name in ("tokens", "positions", "segment_ids", "trainable"):
            array = steps[step][name]
            digest.update(str((name, array.shape, array.dtype)).encode() + array.tobytes())
    assert digest.hexdigest() == PINNED[recipe]
