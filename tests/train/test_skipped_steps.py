"""Skipped steps: which gradients are refused, what stays as it was, and when a run gives up."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.examples.tiny_run import ARCHITECTURE, metric_lines, tiny_recipe
from train.data.manifest import read_manifest
from train.data.order import StepRows
from train.data.shards import ShardRows
from train.loop import train as run_training
from train.optimizer import make_optimizer
from train.recipe.config import ModelSection, OptimizerSection
from train.step import (
    NORM_DECAY,
    Guard,
    GuardState,
    TrainState,
    accumulate,
    judge,
    make_train_step,
    prepare,
)
from wedlm_jax.errors import InputError


def after(norms, guard, first_step=100):
    """What becomes of steps with these gradient norms, one after another."""
    state, taken, skipped = GuardState.first(), [], []
    for step, norm in enumerate(norms, first_step):
        ok, state = judge(guard, state, jnp.int32(step), jnp.float32(norm))
        taken.append(bool(ok))
        skipped.append(int(state.skipped))
    return taken, skipped, state


def test_what_is_not_finite_is_skipped_and_counted():
    taken, skipped, state = after([1.0, np.nan, np.inf, 1.0], Guard())
    assert taken == [True, False, False, True]
    assert skipped == [0, 1, 2, 0]
    assert float(state.mean_norm) == pytest.approx(1.0)


def test_a_spike_is_a_multiple_of_the_running_mean():
    taken, _, state = after([1.0, 9.0, 12.0, 11.0], Guard(spike_factor=10.0))
    # After a norm of 9 the mean is 1.16: 12 is above ten times that, 11 below.
    assert taken == [True, True, False, True]
    mean = NORM_DECAY + (1 - NORM_DECAY) * 9
    assert float(state.mean_norm) == pytest.approx(NORM_DECAY * mean + (1 - NORM_DECAY) * 11)


def test_spikes_are_not_looked_for_before_the_norms_have_settled():
    guard = Guard(spike_factor=10.0, settle=50)
    assert after([1.0, 100.0], guard, first_step=0)[0] == [True, True]
    assert after([1.0, 100.0], guard, first_step=50)[0] == [True, False]
    assert after([1.0, 100.0], Guard(spike_factor=0.0))[0] == [True, True]


def broken(output, tokenizer, **changes):
    """A recipe whose weights are so large that no loss is finite."""
    model = ModelSection(architecture={**ARCHITECTURE, "initializer_range": 1e30})
    return tiny_recipe(output, tokenizer, model=model, **changes)


@pytest.mark.full
def test_a_run_whose_loss_is_no_number_stops_and_names_the_batches(
    tokenizer_folder, tmp_path, capsys
):
    optimizer = OptimizerSection(learning_rate=0.01, warmup_steps=1, max_skipped=3)
    config = broken(tmp_path, tokenizer_folder, optimizer=optimizer)
    with pytest.raises(InputError, match=r"step 3: 3 steps in a row were skipped.*skipped\.jsonl"):
        run_training(config)
    said = capsys.readouterr().out
    assert "step 1 skipped: loss" in said
    assert "gradient_norm nan" in said
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [(line["step"], line["batch"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    assert {line["gradient_norm"] for line in lines} == {None}
    [folder] = map(Path, config.data.sources)
    manifest = read_manifest(folder)
    rows = ShardRows(folder, manifest, 0)
    steps = StepRows([(rows, 1.0)], seed=config.seed, shape=(2, 2))
    for batch, line in enumerate(lines):
        [files] = line["rows"]  # one process
        [(file, named)] = files.items()
        assert file == str(folder / manifest.shards[0].file)
        read = sorted(steps.read(batch, range(2))["tokens"].reshape(4, -1).tolist())
        assert sorted(rows[number]["tokens"].tolist() for number in named) == read
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2]
    assert not (tmp_path / "hf").exists()
    # The same command goes on behind them, and counts from there: this step is the first.
    run_training(config)
    said = capsys.readouterr().out
    assert "resumed from step 3" in said
    assert "step 4 skipped" in said


def test_a_skipped_step_changes_nothing_but_the_count():
    from tests.examples.train_step import KEY, fresh_state, named, training_rows, wedlm_step

    spoilt = fresh_state()
    scale = spoilt.parameters["norm"]["scale"]
    scale[...] = scale[...].at[0].set(jnp.inf)
    before = jax.tree.map(np.asarray, spoilt)
    after_it, metrics = wedlm_step(spoilt, training_rows(), KEY)
    assert int(after_it.step) == 1
    assert int(metrics["skipped"]) == int(after_it.guard.skipped) == 1
    for part in ("parameters", "optimizer"):
        old, new = named(getattr(before, part)), named(getattr(after_it, part))
        for name, value in new.items():
            np.testing.assert_array_equal(value, old[name], err_msg=name)
    assert dataclasses.asdict(after_it.guard)["mean_norm"] == 0


@pytest.mark.full
def test_the_learning_rate_moves_on_and_the_bias_correction_does_not():
    """Steps 0 and 2 are taken, 1 is not: by values, from the gradients alone."""
    from tests.examples.train_step import (
        B1,
        B2,
        EPSILON,
        GRAPH,
        KEY,
        OBJECTIVE,
        fresh_state,
        named,
        training_rows,
    )

    def schedule(step):
        return 0.01 * (1 + step)

    optimizer = make_optimizer(
        schedule, b1=B1, b2=B2, eps=EPSILON, weight_decay=0.0, clip_norm=1e9, average=0.5
    )
    step = make_train_step(GRAPH, optimizer, OBJECTIVE, schedule=schedule)

    def gradients(parameters, number):
        prepared = prepare(OBJECTIVE, training_rows(number), jax.random.fold_in(KEY, number))
        found = accumulate(GRAPH, parameters, *prepared)[0]
        return {name: x.astype(np.float64) for name, x in named(found).items()}

    parameters = fresh_state().parameters
    state = TrainState(jnp.int32(0), parameters, optimizer.init(parameters))
    first = gradients(parameters, 0)
    state, metrics = step(state, training_rows(0), KEY)
    assert float(metrics["learning_rate"]) == pytest.approx(0.01)
    kept = jax.tree.map(jnp.array, state.parameters)

    spoilt = jax.tree.map(jnp.array, kept)
    spoilt["norm"]["scale"][...] = spoilt["norm"]["scale"][...].at[0].set(jnp.inf)
    state, metrics = step(dataclasses.replace(state, parameters=spoilt), training_rows(1), KEY)
    assert int(metrics["skipped"]) == 1
    assert float(metrics["learning_rate"]) == pytest.approx(0.02)

    before, third = named(kept), gradients(kept, 2)
    state, metrics = step(dataclasses.replace(state, parameters=kept), training_rows(2), KEY)
    assert int(metrics["skipped"]) == 0
    assert float(metrics["learning_rate"]) == pytest.approx(0.03)
    for name, after in named(state.parameters).items():
        one, two = first[name], third[name]
        mean = (1 - B1) * (B1 * one + two) / (1 - B1**2)
        square = (1 - B2) * (B2 * one**2 + two**2) / (1 - B2**2)
        expected = -0.03 * mean / (np.sqrt(square) + EPSILON)
        # Where gradients are of rounding's size, so is the sign that Adam makes of them.
        sure = (np.minimum(np.abs(one), np.abs(two)) > 1e-5) | ((one == 0) & (two == 0))
        assert sure.mean() > 0.5, name
        moved = after.astype(np.float64) - before[name]
        np.testing.assert_allclose(moved[sure], expected[sure], atol=5e-5, err_msg=name)
    # The moving average has seen two updates, too.
    assert optax.tree_utils.tree_get(state.optimizer, "updates") == 2
