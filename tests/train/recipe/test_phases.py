"""Phases: what changes at given steps, and rows that are neither read twice nor left out."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.data import NumberedRows
from tests.examples.tiny_run import metric_lines, run_until_killed, tiny_recipe
from train.data.batches import PhasedBatches
from train.data.order import rows_taken
from train.loop import train as run_training
from train.optimizer import schedule_of
from train.recipe.config import (
    DataSection,
    OptimizerSection,
    PhaseSection,
    TrainConfig,
    load_config,
)
from train.recipe.phases import phases_of, source_names
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.errors import InputError

SETS = {"a": NumberedRows(60), "b": NumberedRows(40, 100), "c": NumberedRows(20, 200, 8)}


def recipe(*phases, steps=12):
    data = DataSection(sources={"a": 0.75, "b": 0.25}, tokenizer="t")
    optimizer = OptimizerSection(learning_rate=1.0, final_learning_rate=0.1, warmup_steps=2)
    return TrainConfig(
        steps=steps,
        rows=2,
        accumulation=2,
        row_length=4,
        block_size=4,
        phases=list(phases),
        data=data,
        optimizer=optimizer,
    )


def read(config, start=0):
    """The numbers of the rows of every step, ``[A, R]``."""
    phases = phases_of(config)
    data = [
        [(SETS[name], weight) for name, weight in phase.config.data.sources.items()]
        for phase in phases
    ]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    names = source_names(config)
    batches = PhasedBatches(phases, data, sharding, start, sources=len(names))
    try:
        rows = [next(batches) for _ in range(start, config.steps)]
        for step, batch in enumerate(rows, start):
            [files] = batches.read_from(step)
            named = [int(file.split()[-1]) + i for file, numbers in files.items() for i in numbers]
            assert sorted(named) == sorted(np.asarray(batch.tokens)[:, :, 0].flat)
    finally:
        batches.close()
    for step, batch in enumerate(rows, start):
        [phase] = [p for p in phases if p.first <= step < p.stop]
        assert batch.tokens.shape == phase.batch_shape[:3]
        assert batch.source is not None
        told = [names[number] for number in np.asarray(batch.source).argmax(-1).flat]
        assert told == ["abc"[row // 100] for row in np.asarray(batch.tokens)[:, :, 0].flat]
    return [np.asarray(batch.tokens)[:, :, 0] for batch in rows]


def in_one(batches):
    return [int(row) for batch in batches for row in batch.flat]


def test_a_change_of_the_mixture_goes_on_with_each_source_where_it_was():
    plain = in_one(read(recipe(steps=16)))
    changed = in_one(
        read(recipe(PhaseSection(from_step=6, sources={"b": 0.5, "a": 0.5}), steps=16))
    )
    assert changed[:24] == plain[:24]
    for low, high in ((0, 100), (100, 200)):
        # Each source is read in the same sequence, whatever its share.
        one, other = ([x for x in rows if low <= x < high] for rows in (plain, changed))
        shorter = min(len(one), len(other))
        assert one[:shorter] == other[:shorter]
        assert len(set(other[:40])) == min(len(other), 40)  # nothing twice in an epoch
    later = Counter(x // 100 for x in changed[24:])
    assert later[0] == later[1] == 20


def test_a_new_source_its_row_length_and_a_larger_batch():
    config = recipe(
        PhaseSection(from_step=4, accumulation=4),
        PhaseSection(from_step=8, sources={"c": 1.0}, row_length=8, rows=1),
    )
    batches = read(config)
    assert [batch.shape for batch in batches] == [(2, 2)] * 4 + [(4, 2)] * 4 + [(4, 1)] * 4
    # A larger batch is read from the same sequence of rows.
    assert in_one(batches[:8]) == in_one(read(recipe(steps=40)))[: 16 + 32]
    assert {x // 100 for x in in_one(batches[8:])} == {2}


def test_a_run_that_resumes_within_any_phase_reads_the_same():
    phases = [PhaseSection(from_step=3, sources={"a": 1.0}), PhaseSection(from_step=7, rows=4)]
    whole = read(recipe(*phases))
    for start in (2, 3, 5, 7, 11):
        again = read(recipe(*phases), start)
        assert [b.tolist() for b in again] == [b.tolist() for b in whole[start:]]


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.3], [5, 1, 0.01]])
def test_rows_of_a_mix_are_counted(weights):
    for rows in (0, 1, 7, 1000):
        taken = rows_taken(weights, rows)
        assert sum(taken) == rows
        for count, weight in zip(taken, weights, strict=True):
            assert abs(count - rows * weight / sum(weights)) <= 1.5


def test_the_learning_rate_of_a_phase_scales_the_schedule():
    plain = schedule_of(recipe())
    changed = schedule_of(
        recipe(
            PhaseSection(from_step=4, learning_rate=0.5),
            PhaseSection(from_step=6, rows=4),
            PhaseSection(from_step=8, learning_rate=2.0),
        )
    )
    for step, factor in ((0, 1), (3, 1), (4, 0.5), (7, 0.5), (8, 2), (11, 2)):
        assert float(changed(step)) == pytest.approx(factor * float(plain(step)))


def test_warm_up_stable_decay():
    config = recipe(steps=20)
    config.optimizer.schedule, config.optimizer.decay_steps = "wsd", 5
    rates = [float(schedule_of(config)(step)) for step in range(21)]
    assert rates[:3] == pytest.approx([0, 0.5, 1])
    assert rates[2:16] == pytest.approx([1] * 14)
    assert rates[15:] == pytest.approx([1, 0.82, 0.64, 0.46, 0.28, 0.1])
    config.phases, config.optimizer.learning_rate = [PhaseSection(from_step=4, rows=4)], 0.0
    assert float(schedule_of(config)(10)) == 0  # no phase changes the rate
    config.optimizer.decay_steps = 19
    with pytest.raises(InputError, match=r"decay_steps must be at most 18.* not 19"):
        schedule_of(config)


@pytest.mark.parametrize(
    ("phases", "told"),
    [
        ([PhaseSection(from_step=12)], r"phases\[0\].from_step must be 1 to 11"),
        (
            [PhaseSection(from_step=5), PhaseSection(from_step=5)],
            r"phases\[1\].from_step must be 6 to 11, .*not 5",
        ),
        ([PhaseSection(row_length=8)], r"phases\[0\].row_length needs sources"),
        ([PhaseSection(row_length=6, sources={"c": 1})], "6 is not a multiple of block_size 4"),
    ],
)
def test_phases_that_cannot_be_are_refused(phases, told):
    with pytest.raises(InputError, match=told):
        phases_of(recipe(*phases))


def test_phases_are_read_from_a_recipe_and_checked(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "steps: 100\nrow_length: 64\nblock_size: 32\n"
        "data: {tokenizer: t, sources: {a: 1}}\n"
        "phases:\n- from_step: 10\n  rows: 16\n- {from_step: 50, sources: {b: 2}}\n"
    )
    first, second, third = phases_of(load_config(path))
    assert (first.config.rows, second.config.rows, third.config.rows) == (8, 16, 16)
    assert (third.first, third.stop, third.config.data.sources) == (50, 100, {"b": 2.0})
    with pytest.raises(InputError, match=r"phases\[0\]\.rows must be at least 1, not 0"):
        load_config(path, ["phases=[{from_step: 10, rows: 0}]"])
    with pytest.raises(InputError, match="unknown key"):
        load_config(path, ["phases=[{from_stop: 10}]"])


def test_a_later_phase_without_rows_for_a_batch_is_refused_before_the_first(
    tokenizer_folder, tmp_path
):
    phases = [PhaseSection(from_step=2, rows=1000)]
    with pytest.raises(InputError, match=r"data: \d+ packed rows are fewer than one batch of 2000"):
        run_training(tiny_recipe(tmp_path, tokenizer_folder, phases=phases))
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.full
def test_a_run_through_phases_is_the_same_when_it_is_stopped_within_one(tokenizer_folder, tmp_path):
    optimizer = OptimizerSection(learning_rate=0.01, warmup_steps=1, average=0.5)
    phases = [PhaseSection(from_step=2, accumulation=1, learning_rate=0.005)]
    settings = {"phases": phases, "optimizer": optimizer, "checkpoint_every": 3}
    run_training(tiny_recipe(tmp_path / "whole", tokenizer_folder, **settings))
    config = tiny_recipe(tmp_path / "cut", tokenizer_folder, **settings)
    run_until_killed(config, 3)
    run_training(config)
    whole, cut = (metric_lines(tmp_path / name) for name in ("whole", "cut"))
    assert cut == whole
    assert_same_bits(hf_values(tmp_path / "cut" / "hf"), hf_values(tmp_path / "whole" / "hf"))
    plain = schedule_of(dataclasses.replace(config, phases=[]))
    rates = [line["learning_rate"] for line in whole]
    assert rates == pytest.approx([float(plain(i)) * (1, 1, 0.5, 0.5)[i] for i in range(4)])
    # A phase that the run has been through cannot be changed; the model exported is the average.
    changed = dataclasses.replace(config, phases=[])
    with pytest.raises(InputError, match="phases before step 4 were"):
        run_training(changed)
    newest = tmp_path / "newest"
    convert(tmp_path / "cut", newest)
    exported, last = hf_values(tmp_path / "cut" / "hf"), hf_values(newest)
    assert any((exported[name] != last[name]).any() for name in exported)
