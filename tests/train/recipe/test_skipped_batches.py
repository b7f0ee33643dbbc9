"""Batches that are left out: which batch each step reads, whatever stops, resumes or shares it."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.data import NumberedRows
from tests.examples.tiny_run import (
    ARCHITECTURE,
    metric_lines,
    on_devices,
    run_until_killed,
    tiny_recipe,
)
from tests.train.recipe.test_phases import read, recipe
from train.data.batches import TrainBatches
from train.data.order import StepRows
from train.loop import train as run_training
from train.recipe.config import ModelSection, PhaseSection, load_config
from train.recipe.skipped_batches import SkippedBatches
from wedlm_jax.errors import InputError

RECIPE = Path(__file__).parents[3] / "configs" / "finetune.yaml"


def skipping(config, *ranges):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, skip=list(ranges)))


@given(st.sets(st.integers(1, 40)), st.integers(0, 30))
def test_steps_read_what_is_left_in_order(left_out, step):
    skipped = SkippedBatches.of([[number, number] for number in left_out])
    left = [0] + [number for number in range(1, 100) if number not in left_out]
    assert skipped.batch(step) == left[step]
    passed = {n for first, last in skipped.passed(step) for n in range(first, last + 1)}
    assert passed == {number for number in left_out if number < left[step]}
    told = [one for number in range(1, step + 1) for one in skipped.passed_by(number)]
    assert tuple(told) == skipped.passed(step)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("[[5, 3]]", r"data\.skip\[0\] must be \[from, to\], .*counted from 1, not \[5, 3\]"),
        ("[[0, 3]]", r"data\.skip\[0\] must be"),
        ("[[9, 9], [1, 2, 3]]", r"data\.skip\[1\] must be .*not \[1, 2, 3\]"),
        ("[[8, 12], [2, 8]]", "two ranges have batch 8"),
        ("[5, 9]", r"data\.skip: expected a list of ranges, such as \[\[5001, 5050\]\]"),
        ("5", r"data\.skip: expected a list of ranges"),
        ("[[a, 9]]", r"data\.skip\[0\]\[0\]: expected a list of ranges.*not 'a'"),
    ],
)
def test_what_is_no_list_of_ranges_is_refused(given, told):
    with pytest.raises(InputError, match=told):
        load_config(RECIPE, [f"data.skip={given}"])


def test_ranges_may_be_given_in_any_order_and_touch():
    config = load_config(RECIPE, ["data.skip=[[7, 9], [2, 3], [4, 4]]"])
    assert SkippedBatches.of(config.data.skip).ranges == ((2, 4), (7, 9))


def test_a_run_reads_all_batches_but_these(capsys):
    plain = read(recipe(steps=20))
    found = read(skipping(recipe(steps=12), [9, 10], [1, 1], [4, 6]))
    left = [plain[number - 1] for number in (2, 3, 7, 8, *range(11, 19))]
    assert [b.tolist() for b in found] == [b.tolist() for b in left]
    assert capsys.readouterr().out.splitlines() == [
        "step 1: batches 1 to 1 are skipped (data.skip)",
        "step 3: batches 4 to 6 are skipped (data.skip)",
        "step 5: batches 9 to 10 are skipped (data.skip)",
    ]


def test_a_phase_begins_behind_what_the_one_before_it_skipped():
    """And a range that its first step would read is of that phase."""
    config = skipping(
        recipe(PhaseSection(from_step=4, accumulation=4), PhaseSection(from_step=8, rows=4)),
        *([2, 3], [7, 7], [13, 13]),
    )
    # The same with phases that have room for what is skipped in them: two, one and one batch.
    roomy = recipe(
        PhaseSection(from_step=6, accumulation=4), PhaseSection(from_step=11, rows=4), steps=16
    )
    left = [batch for number, batch in enumerate(read(roomy), 1) if number not in (2, 3, 7, 13)]
    found = read(config)
    assert [batch.tolist() for batch in found] == [batch.tolist() for batch in left]
    for start in range(12):
        again = read(config, start)
        assert [b.tolist() for b in again] == [b.tolist() for b in found[start:]]


def test_hosts_and_meshes_read_their_rows_of_the_same_batches():
    skipped = SkippedBatches(((3, 7),))
    sets = [(NumberedRows(40), 1.0)]
    steps = StepRows(sets, seed=1, shape=(2, 8), skipped=skipped)

    def rows(hosts):
        share = 8 // hosts
        parts = [steps.read(4, range(h * share, (h + 1) * share)) for h in range(hosts)]
        return sorted(int(x) for part in parts for x in part["tokens"][:, :, 0].flat)

    plain = StepRows(sets, seed=1, shape=(2, 8)).read(9, range(8))
    expected = sorted(plain["tokens"][:, :, 0].flatten().tolist())
    assert [rows(hosts) for hosts in (1, 2, 4)] == [expected] * 3


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_the_same(workers):
    data = [(NumberedRows(40), 1.0)]
    config = skipping(recipe(steps=6), [2, 4])
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, workers=workers, sources={})
    )
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    plain = StepRows(data, seed=config.seed, shape=(2, 2))
    with TrainBatches(data, config, sharding, start=1) as batches:
        for batch in (4, 5, 6):
            expected = plain.read(batch, range(2))["tokens"]
            np.testing.assert_array_equal(next(batches).tokens, expected)


@pytest.mark.full
def test_a_run_with_skipped_batches_stopped_and_resumed_on_another_mesh(
    tokenizer_folder, tmp_path, monkeypatch, capsys
):
    plain = tiny_recipe(tmp_path / "plain", tokenizer_folder, steps=6, checkpoint_every=2)
    run_training(plain)
    # Before the range nothing is other: its states are those of the run without it.
    config = skipping(dataclasses.replace(plain, output=str(tmp_path / "whole")), [4, 5])
    run_training(config)
    whole = metric_lines(tmp_path / "whole")
    assert whole[:3] == metric_lines(tmp_path / "plain")[:3]
    assert [line.get("batch") for line in whole] == [None, None, None, 6, 7, 8]
    cut = dataclasses.replace(config, output=str(tmp_path / "cut"))
    run_until_killed(cut, 5)
    capsys.readouterr()
    run_training(cut)
    assert "resumed from step 4" in capsys.readouterr().out
    assert metric_lines(tmp_path / "cut") == whole
    assert_same_bits(hf_values(tmp_path / "cut" / "hf"), hf_values(tmp_path / "whole" / "hf"))
    # What was read cannot be skipped any more; what comes can.
    for ranges in ([], [[4, 5], [2, 2]], [[4, 6]]):
        with pytest.raises(InputError, match=r"data.skip was \[\[4, 5\]\], is .* 6 steps have"):
            run_training(skipping(cut, *ranges))
    other = dataclasses.replace(config, output=str(tmp_path / "other"))
    run_until_killed(other, 5)
    on_devices(monkeypatch, 2)
    run_training(skipping(other, [4, 5], [8, 9]))
    lines = metric_lines(tmp_path / "other")
    assert [line["batch"] for line in lines[3:]] == [6, 7, 10]
    assert "step 6: batches 8 to 9 are skipped" in capsys.readouterr().out
    # Step 6 of this run has the parameters of the other's, but for rounding, and another batch.
    assert lines[4]["loss"] == pytest.approx(whole[4]["loss"], rel=1e-4)
    assert lines[5]["loss"] != pytest.approx(whole[5]["loss"], rel=1e-4)


@pytest.mark.full
def test_the_batch_of_a_step_that_was_not_taken_is_named_by_its_own_number(
    tokenizer_folder, tmp_path
):
    model = ModelSection(architecture={**ARCHITECTURE, "initializer_range": 1e30})
    run_training(skipping(tiny_recipe(tmp_path, tokenizer_folder, model=model), [2, 6]))
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [(line["step"], line["batch"]) for line in lines] == [(1, 1), (2, 7), (3, 8), (4, 9)]
