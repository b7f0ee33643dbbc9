"""The training step: accumulation, update, randomness, and what it never holds in memory."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.tiny_run import ARCHITECTURE, metric_lines, tiny_recipe
from tests.examples.train_step import (
    ADAMW,
    CHUNK,
    GRAPH,
    KEY,
    LENGTH,
    OBJECTIVE,
    PARAMETERS,
    assert_same,
    fresh_state,
    global_batch,
    gradients_of,
    micro_batches,
    named,
    optimizer,
    training_rows,
    wedlm_step,
)
from tests.examples.training import BLOCK, packed, random_sample
from tests.examples.training import PLAIN as MODEL
from tests.jaxpr_shapes import shapes_in
from train.loop import train as run_training
from train.optimizer import decayed
from train.program import make_program
from train.recipe.config import LoraSection, ModelSection, OptimizerSection
from train.step import (
    NORM_DECAY,
    GuardState,
    Objective,
    group_norms,
    judge,
    make_evaluation_step,
    make_train_step,
    prepare,
)
from wedlm_jax.corruption import sample_masks
from wedlm_jax.errors import InputError
from wedlm_jax.loss import LossConfig
from wedlm_jax.sharding import make_mesh

AR_OBJECTIVE = Objective("ar", BLOCK, None, LossConfig(chunk=CHUNK))


@pytest.fixture(scope="module")
def whole_batch():
    return gradients_of(*global_batch(), steps=1, objective=OBJECTIVE)


SOURCES = jnp.asarray([[0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]], bool)
"""Of the rows of `global_batch`; the third has none of them."""


def of_source(number):
    """`global_batch` with nothing to learn from the rows of other sources."""
    rows, masked, ratio = global_batch()
    own = SOURCES[:, number, None]
    return dataclasses.replace(rows, trainable=rows.trainable & own), masked & own, ratio


def test_accumulation_equals_one_big_batch_and_losses_by_source_are_those_of_its_rows(whole_batch):
    """Micro-batches of one row: two have targets, of different numbers, and two have none."""
    rows, masked, ratio = global_batch()
    rows = dataclasses.replace(rows, source=SOURCES)
    found = gradients_of(rows, masked, ratio, steps=4, objective=OBJECTIVE)
    by_source = {name: found[1].pop(f"{name}_by_source") for name in ("mlm_loss", "ar_loss")}
    assert float(whole_batch[1]["loss"]) > 1
    assert_same(found, whole_batch)
    for number in range(3):
        alone = gradients_of(*of_source(number), steps=1, objective=OBJECTIVE)[1]
        for name, values in by_source.items():
            np.testing.assert_allclose(values[number], alone[name], rtol=1e-5, err_msg=name)
            assert (float(values[number]) > 1) == (number < 2)


def test_next_token_losses_by_source_are_those_of_its_rows_and_draw_no_masks():
    evaluate = make_evaluation_step(GRAPH, AR_OBJECTIVE)

    def losses(rows, key=KEY):
        rows = dataclasses.replace(rows, source=SOURCES)
        return evaluate(PARAMETERS, jax.tree.map(lambda x: micro_batches(x, 2), rows), key)

    whole = losses(global_batch()[0])
    alone = [losses(of_source(number)[0])["ar_loss"] for number in range(3)]
    np.testing.assert_allclose(whole["ar_loss_by_source"], alone, rtol=1e-5)
    assert float(whole["ar_loss"]) == float(whole["loss"])
    assert float(losses(global_batch()[0], jax.random.key(1))["loss"]) == float(whole["loss"])


def test_what_losses_by_source_are_divided_by_is_counted():
    rows = dataclasses.replace(global_batch()[0], source=SOURCES)
    rows = jax.tree.map(lambda x: micro_batches(x, 2), rows)
    for objective in (OBJECTIVE, AR_OBJECTIVE):
        counts = jax.jit(lambda rows, objective=objective: prepare(objective, rows, KEY)[1])(rows)
        # Of 13 and 15 tokens, 5, 20 and none; a sample's first token is no target, nor a prompt's.
        np.testing.assert_array_equal(counts["tokens_by_source"], [5, 13 + 15 + 20, 0])
        np.testing.assert_array_equal(counts["ar_by_source"], [4, 12 + 11, 0])
        if "mlm" in counts:
            np.testing.assert_allclose(counts["mlm_by_source"].sum(), counts["mlm"], rtol=1e-6)


def test_how_it_is_computed_changes_no_gradient(whole_batch):
    loss = dataclasses.replace(OBJECTIVE.loss, remat="full", unroll=2, attention="dense")
    objective = dataclasses.replace(OBJECTIVE, loss=loss)
    assert_same(gradients_of(*global_batch(), steps=1, objective=objective), whole_batch)


def test_bfloat16_compute_keeps_float32_sums(whole_batch):
    loss = dataclasses.replace(OBJECTIVE.loss, dtype="bfloat16")
    objective = dataclasses.replace(OBJECTIVE, loss=loss)
    gradients, metrics = gradients_of(*global_batch(), steps=2, objective=objective)
    leaves = [*jax.tree.leaves(gradients), *metrics.values()]
    assert {leaf.dtype for leaf in leaves} == {np.dtype("float32")}
    # bfloat16 has eight bits, so it must differ, and only by so much.
    error = abs(float(metrics["loss"]) / float(whole_batch[1]["loss"]) - 1)
    assert 0 < error < 0.05


def traced_shapes(chunk, attention):
    loss = LossConfig(chunk=chunk, attention=attention)
    step = make_train_step(GRAPH, optimizer(), dataclasses.replace(OBJECTIVE, loss=loss))
    state, rows = jax.eval_shape(fresh_state), training_rows()
    return set(shapes_in(jax.make_jaxpr(step)(state, rows, KEY).jaxpr))


def test_neither_logits_of_a_whole_row_nor_a_mask_over_both_streams_exist():
    def rows_of_logits(shapes):
        parameters = {(12, 97), (97,)}  # which have the vocabulary's axis, too
        return max(int(np.prod(s[:-1])) for s in shapes if s[-1:] == (97,) and s not in parameters)

    def square(shapes):
        return any(shape[-2:] == (2 * LENGTH, 2 * LENGTH) for shape in shapes)

    shapes, control = traced_shapes(CHUNK, "streams"), traced_shapes(LENGTH, "dense")
    assert (rows_of_logits(shapes), square(shapes)) == (CHUNK, False)
    # The measures see whole rows where the chunk is one, and a dense mask.
    assert (rows_of_logits(control), square(control)) == (LENGTH, True)


def test_a_step_is_adamw_on_clipped_gradients():
    """Of masks that the key and the number of the step name, a key for each row: a device's memory
    decides how a step is cut (`train.automatic`), and should not decide what is learned."""
    rows = global_batch()[0]
    keys = jax.random.split(jax.random.fold_in(KEY, 5), 4)
    draw = jax.jit(jax.vmap(lambda key, row: sample_masks(key, row[None], BLOCK, suffix_share=0.5)))
    masked, ratio = (x[:, 0] for x in draw(keys, rows.trainable))
    rows = dataclasses.replace(rows, source=SOURCES)
    found = gradients_of(rows, masked, ratio, steps=4, objective=OBJECTIVE)
    gradients = named(found[0])
    norm = np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in gradients.values()))
    assert norm > ADAMW.clip_norm

    state, metrics = wedlm_step(fresh_state(5), training_rows(), KEY)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    assert int(state.step) == 6
    after, is_decayed = named(state.parameters), named(decayed(PARAMETERS))
    for name, before in named(PARAMETERS).items():
        clipped = gradients[name].astype(np.float64) * ADAMW.clip_norm / norm
        # Of the first step, whose means are the gradient and its square.
        update = clipped / (np.abs(clipped) + ADAMW.eps)
        update += ADAMW.weight_decay * is_decayed[name] * before
        expected = before - ADAMW.learning_rate * update
        # Where the gradient is of rounding's size, so is the sign that Adam makes of it.
        sure = (np.abs(clipped) > 1e-5) | (gradients[name] == 0)
        assert sure.mean() > 0.5, name
        np.testing.assert_allclose(after[name][sure], expected[sure], atol=2e-5, err_msg=name)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_a_step_is_finite_whatever_the_rows_hold(seed):
    random = np.random.default_rng(seed)

    def row():
        kind = random.integers(4)
        if kind == 0:
            return []
        length = int(random.integers(1, LENGTH + 1))
        prompt = length if kind == 1 else int(random.integers(length))
        return [random_sample(random, length, prompt)]

    rows, _, _ = packed([row() for _ in range(4)], LENGTH)
    rows = jax.tree.map(lambda x: micro_batches(x, 2), rows)
    state, metrics = wedlm_step(fresh_state(), rows, jax.random.key(seed))
    for leaf in jax.tree.leaves((state.parameters, metrics)):
        assert np.isfinite(leaf).all()


def test_the_groups_are_all_parameters_and_each_is_its_leaves_norm():
    parameters = PARAMETERS
    norms = jax.jit(partial(group_norms, name="parameter"))(parameters)
    groups = ("attention", "embedding", "head", "mlp", "norms")
    assert sorted(norms) == [f"parameter_norm_{group}" for group in groups]
    squares = sum(float(np.square(x).sum()) for x in jax.tree.leaves(parameters))
    assert sum(float(x) ** 2 for x in norms.values()) == pytest.approx(squares, rel=1e-5)
    mlp = jax.tree.leaves(parameters["layers"]["mlp"])
    expected = np.sqrt(sum(np.square(x).sum() for x in mlp))
    assert float(norms["parameter_norm_mlp"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_a_recipe_says_whether_products_are_of_integers():
    """A scan's layers count once."""
    config, mesh = tiny_recipe(Path("unused"), None), make_mesh({}, jax.devices()[:1])

    def integer_products(**changes):
        with jax.set_mesh(mesh):
            program = make_program(dataclasses.replace(config, **changes), MODEL, mesh)
            lines = program.lower().as_text().splitlines()
        return sum("dot_general" in line and "xi8>, tensor" in line for line in lines)

    assert integer_products() == 0
    assert integer_products(quantized_training="int8") == 3 * 7
    # What is frozen takes part in no product for its own gradient.
    assert integer_products(quantized_training="int8", lora=LoraSection(rank=2)) >= 2 * 7


@pytest.mark.parametrize(
    ("norms", "spike_factor", "first_step", "expected"),
    [
        ([1.0, np.nan, np.inf, 1.0], 0.0, 100, [True, False, False, True]),
        # After a norm of 9 the mean is 1.16: 12 is above ten times that, 11 below.
        ([1.0, 9.0, 12.0, 11.0], 10.0, 100, [True, True, False, True]),
        # Spikes are not looked for before the norms have settled.
        ([1.0, 100.0], 10.0, 0, [True, True]),
        ([1.0, 100.0], 10.0, 50, [True, False]),
        ([1.0, 100.0], 0.0, 100, [True, True]),
    ],
)
def test_steps_that_are_not_finite_or_a_multiple_of_the_running_mean_are_skipped(
    norms, spike_factor, first_step, expected
):
    state, mean, in_a_row = GuardState.first(), None, 0
    for step, (norm, is_taken) in enumerate(zip(norms, expected, strict=True), first_step):
        taken, state = judge(state, jnp.int32(step), jnp.float32(norm), spike_factor)
        assert bool(taken) == is_taken
        in_a_row = 0 if is_taken else in_a_row + 1
        assert int(state.skipped) == in_a_row
        if is_taken:
            mean = norm if mean is None else NORM_DECAY * mean + (1 - NORM_DECAY) * norm
        assert float(state.mean_norm) == pytest.approx(mean)


@pytest.mark.full
def test_a_run_whose_loss_is_no_number_stops_and_names_the_batches(
    tokenizer_folder, tmp_path, capsys
):
    """Batches are named by their own numbers, of which two are skipped by the recipe."""
    # Weights so large that no loss is finite.
    model = ModelSection(architecture={**ARCHITECTURE, "initializer_range": 1e30})
    optimizer = OptimizerSection(learning_rate=0.01, warmup_steps=1, max_skipped=3)
    config = tiny_recipe(tmp_path, tokenizer_folder, model=model, optimizer=optimizer)
    config.data.skip = [[2, 6]]
    with pytest.raises(InputError, match=r"step 3: 3 steps in a row were skipped.*skipped\.jsonl"):
        run_training(config)
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [(line["step"], line["batch"]) for line in lines] == [(1, 1), (2, 7), (3, 8)]
    for line in lines:
        [files] = line["rows"]  # one process
        assert [len(numbers) for numbers in files.values()] == [4]
        assert line["gradient_norm"] is None
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2]
    assert not (tmp_path / "hf").exists()
    # The same command goes on behind them, and counts from there: this step is the first.
    run_training(config)
    said = capsys.readouterr().out
    assert "resumed from step 3" in said
    assert "step 4 skipped: loss" in said


def test_a_skipped_step_changes_nothing_but_the_count():
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
@pytest.mark.parametrize("objective", [OBJECTIVE, AR_OBJECTIVE], ids=["wedlm", "ar"])
def test_without_a_target_only_the_decay_moves_parameters(objective):
    step = make_train_step(GRAPH, optimizer(), objective)
    nothing = dataclasses.replace(training_rows(), trainable=jnp.zeros((2, 2, LENGTH), bool))
    state, metrics = step(fresh_state(), nothing, KEY)
    norms = ("parameter_norm", "update_norm")  # the decay's
    rest = {name: value for name, value in metrics.items() if not name.startswith(norms)}
    assert not any(np.any(value) for value in jax.tree.leaves(rest)), rest
    is_decayed, after = named(decayed(PARAMETERS)), named(state.parameters)
    for name, before in named(PARAMETERS).items():
        expected = before * (1 - ADAMW.learning_rate * ADAMW.weight_decay * is_decayed[name])
        np.testing.assert_allclose(after[name], expected, rtol=1e-6, err_msg=name)
