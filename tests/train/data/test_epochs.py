"""Epochs of each source: against the rows that a run really reads."""

import dataclasses

import pytest

from tests.examples.data import documents, tokenised, write_jsonl
from tests.examples.tiny_run import metric_lines, run_until_killed
from tests.train.recipe.test_phases import SETS, read, recipe
from tests.train.recipe.test_skipped_batches import skipping
from tests.train.test_resume import with_sources
from train.data.sources import Epochs
from train.loop import train as run_training
from train.recipe.config import PhaseSection
from train.recipe.phases import phases_of, source_names

PHASES = (
    PhaseSection(from_step=4, accumulation=4),
    PhaseSection(from_step=8, sources={"c": 1.0, "b": 3.0}, row_length=8, rows=4),
)


def epochs_of(config):
    return Epochs(phases_of(config), {name: len(SETS[name]) for name in source_names(config)})


@pytest.mark.parametrize("ranges", [[], [[2, 3], [7, 7]]])
def test_epochs_are_those_of_the_rows_that_are_read(ranges):
    config = recipe(*PHASES[:1], steps=12)
    whole = read(recipe(PhaseSection(from_step=6, accumulation=4), steps=16) if ranges else config)
    epochs = epochs_of(skipping(config, *ranges))
    # With these ranges the phases of the other recipe have their batches, skipped ones too.
    batches = [0, 1, 4, 5, 6, 8, 9, 10, 11] if ranges else list(range(13))
    for step, last in enumerate(batches):
        numbers = [int(x) for batch in whole[:last] for x in batch.flat]
        for name, (low, high) in {"a": (0, 100), "b": (100, 200)}.items():
            count = sum(low <= x < high for x in numbers)
            assert epochs.after(step)[name] * len(SETS[name]) == pytest.approx(count, abs=1.5)


def test_a_source_goes_on_where_an_earlier_phase_left_it():
    epochs = epochs_of(recipe(*PHASES))
    assert epochs.after(4) == {"a": 12 / 60, "b": 4 / 40, "c": 0}
    assert epochs.after(8) == {"a": 36 / 60, "b": 12 / 40, "c": 0}
    assert epochs.after(12) == {"a": 36 / 60, "b": (12 + 48) / 40, "c": 16 / 20}
    assert epochs.record(12) == {"epoch/a": 0.6, "epoch/b": 1.5, "epoch/c": 0.8}


def test_what_a_run_takes_is_told_and_too_much_is_warned_of():
    lines = epochs_of(recipe(steps=40)).lines(10)
    assert lines == [
        "a: 2.00 epochs of 60 rows in the whole run, 0.50 done",
        "b: 1.00 epochs of 40 rows in the whole run, 0.25 done",
    ]
    warned = epochs_of(recipe(steps=81)).lines(0)
    assert [line.partition(":")[0] for line in warned] == ["a", "warning", "b"]
    assert "a: more than 4 epochs, from where on" in warned[1]
    assert not any("warning" in line for line in epochs_of(recipe(steps=80)).lines(0))


@pytest.mark.full
def test_a_run_says_its_epochs_at_each_start_and_in_its_metrics(tmp_path, capsys):
    records = write_jsonl(tmp_path / "a.jsonl", documents(20, seed=0))
    rows = tokenised([records], tmp_path / "a").rows
    config = with_sources(tmp_path / "run", {tmp_path / "a": 1.0}, checkpoint_every=2)
    run_until_killed(config, 2)
    assert f"{tmp_path / 'a'}: {16 / rows:.2f} epochs of {rows} rows" in capsys.readouterr().out
    run_training(dataclasses.replace(config))
    said = capsys.readouterr().out
    assert f"{16 / rows:.2f} epochs of {rows} rows in the whole run, {8 / rows:.2f} done" in said
    found = [line[f"epoch/{tmp_path / 'a'}"] for line in metric_lines(tmp_path / "run")]
    assert found == [round(4 * step / rows, 4) for step in (1, 2, 3, 4)]
