"""Phases, skipped batches and epochs: no row is read twice or left out."""

import dataclasses
from collections import Counter
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.data import EMBEDDED, ROW, NumberedRows, documents, tokenised, write_jsonl
from tests.examples.tiny_run import metric_lines, run_until_killed, tiny_recipe
from train.data.batches import TrainBatches
from train.data.sources import Epochs
from train.loop import train as run_training
from train.optimizer import schedule_of
from train.recipe.config import DataSection, OptimizerSection, PhaseSection, TrainConfig
from train.recipe.phases import phases_of, source_names
from train.recipe.skipped_batches import SkippedBatches
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
    batches = TrainBatches(phases, data, sharding, start)
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


def skipping(config, *ranges):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, skip=list(ranges)))


@given(st.lists(st.integers(1, 40), unique=True), st.integers(0, 30))
def test_steps_read_what_is_left_in_order(left_out, step):
    """Ranges may be given in any order, and touch."""
    skipped = SkippedBatches.of([[number, number] for number in left_out])
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(skipped.ranges))
    left = [0] + [number for number in range(1, 100) if number not in left_out]
    assert skipped.batch(step) == left[step]
    passed = {n for first, last in skipped.passed(step) for n in range(first, last + 1)}
    assert passed == {number for number in left_out if number < left[step]}
    told = [one for number in range(1, step + 1) for one in skipped.passed_by(number)]
    assert tuple(told) == skipped.passed(step)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_phase_begins_behind_what_the_one_before_it_skipped_wherever_a_run_resumes(
    capsys, workers
):
    """And a range that its first step would read is of that phase."""
    config = skipping(
        recipe(
            PhaseSection(from_step=4, accumulation=4),
            PhaseSection(from_step=8, rows=4, sources={"a": 1.0}),
        ),
        *([13, 13], [2, 3], [7, 7]),
    )
    config.data.workers = workers
    # The same with phases that have room for what is skipped in them: two, one and one batch.
    roomy = recipe(
        PhaseSection(from_step=6, accumulation=4),
        PhaseSection(from_step=11, rows=4, sources={"a": 1.0}),
        steps=16,
    )
    left = [batch for number, batch in enumerate(read(roomy), 1) if number not in (2, 3, 7, 13)]
    capsys.readouterr()
    found = read(config)
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in left]
    assert capsys.readouterr().out.splitlines() == [
        "step 2: batches 2 to 3 are skipped (data.skip)",
        "step 5: batches 7 to 7 are skipped (data.skip)",
        "step 10: batches 13 to 13 are skipped (data.skip)",
    ]
    for start in (5,) if workers else range(12):
        again = read(config, start)
        assert [b.tolist() for b in again] == [b.tolist() for b in found[start:]]


@pytest.mark.full
def test_a_run_through_phases_and_skipped_batches_is_the_same_when_it_is_stopped(tmp_path, capsys):
    """Of two sources; the second phase reads one of them."""
    a, b = (str(tmp_path / name) for name in "ab")
    for seed, folder in enumerate((a, b)):
        tokenised([write_jsonl(tmp_path / f"{seed}.jsonl", documents(20, seed))], folder)
    optimizer = OptimizerSection(learning_rate=0.01, warmup_steps=1, average=0.5)
    data = DataSection(sources={a: 0.5, b: 0.5}, tokenizer=str(EMBEDDED))
    phases = [PhaseSection(from_step=2, accumulation=1, learning_rate=0.005, sources={b: 1.0})]
    settings = {"optimizer": optimizer, "data": data, "phases": phases}
    settings |= {"steps": 6, "checkpoint_every": 2}
    config = skipping(tiny_recipe(tmp_path / "whole", None, **settings), [4, 5])
    run_training(config)
    whole = metric_lines(tmp_path / "whole")
    assert [line.get("batch") for line in whole] == [None, None, None, 6, 7, 8]
    for line in whole:
        read = [a, b] if line["step"] <= 2 else [b]
        names = {f"{what}/{name}" for what in ("mlm_loss", "ar_loss", "tokens") for name in read}
        assert {name for name in line if "/" in name} - {f"epoch/{a}", f"epoch/{b}"} == names
        for loss in ("mlm_loss", "ar_loss"):
            losses = [line[f"{loss}/{name}"] for name in read]
            assert min(losses) - 1e-5 < line[loss] < max(losses) + 1e-5
    assert ROW < whole[-1][f"tokens/{b}"] <= 2 * ROW
    plain = schedule_of(dataclasses.replace(config, phases=[]))
    assert [line["learning_rate"] for line in whole] == pytest.approx(
        [float(plain(i)) * (1 if i < 2 else 0.5) for i in range(6)]
    )
    cut = dataclasses.replace(config, output=str(tmp_path / "cut"))
    run_until_killed(cut, 5)
    capsys.readouterr()
    run_training(cut)
    assert "resumed from step 4" in capsys.readouterr().out
    assert metric_lines(tmp_path / "cut") == whole
    exported = hf_values(tmp_path / "cut" / "hf")
    assert_same_bits(exported, hf_values(tmp_path / "whole" / "hf"))
    # What is exported is the average, not the newest parameters.
    convert(tmp_path / "cut", tmp_path / "newest")
    last = hf_values(tmp_path / "newest")
    assert any((exported[name] != last[name]).any() for name in exported)
    # A phase that the run has been through, and what was read, cannot be changed any more.
    with pytest.raises(InputError, match="phases before step 6 were"):
        run_training(dataclasses.replace(cut, phases=[]))
    for ranges in ([], [[4, 5], [2, 2]], [[4, 6]]):
        with pytest.raises(InputError, match=r"data.skip was \[\[4, 5\]\], is .* 6 steps have"):
            run_training(skipping(cut, *ranges))


PHASES = (
    PhaseSection(from_step=4, accumulation=4),
    PhaseSection(from_step=8, sources={"c": 1.0, "b": 3.0}, row_length=8, rows=4),
)


def epochs_of(config):
    return Epochs(phases_of(config), {name: len(SETS[name]) for name in source_names(config)})


def test_epochs_go_on_through_phases_and_have_what_is_skipped():
    epochs = epochs_of(recipe(*PHASES))
    assert epochs.after(4) == {"a": 12 / 60, "b": 4 / 40, "c": 0}
    assert epochs.after(8) == {"a": 36 / 60, "b": 12 / 40, "c": 0}
    assert epochs.after(12) == {"a": 36 / 60, "b": (12 + 48) / 40, "c": 16 / 20}
    assert epochs.record(12) == {"epoch/a": 0.6, "epoch/b": 1.5, "epoch/c": 0.8}
    # Two batches of four rows in the first phase, and one of eight in the second.
    epochs = epochs_of(skipping(recipe(*PHASES), [2, 3], [7, 7]))
    assert epochs.after(1) == {"a": 3 / 60, "b": 1 / 40, "c": 0}
    assert epochs.after(4) == {"a": 18 / 60, "b": 6 / 40, "c": 0}
    assert epochs.after(8) == {"a": 48 / 60, "b": 16 / 40, "c": 0}


def test_what_a_run_takes_is_told_and_too_much_is_warned_of():
    lines = epochs_of(recipe(steps=40)).lines(10)
    assert lines == [
        "a: 2.00 epochs of 60 rows in the whole run, 0.50 done",
        "b: 1.00 epochs of 40 rows in the whole run, 0.25 done",
    ]
    warned = epochs_of(recipe(steps=81)).lines(0)
    assert [line.partition(":")[0] for line in warned] == ["a", "warning", "b"]
    assert "a: more than 4 epochs, after which" in warned[1]
    assert not any("warning" in line for line in epochs_of(recipe(steps=80)).lines(0))
