"""The training step: accumulation, update, randomness, and what it never holds in memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.train_step import (
    B1,
    B2,
    CHUNK,
    CLIP_NORM,
    EPSILON,
    GRAPH,
    KEY,
    LEARNING_RATE,
    LENGTH,
    OBJECTIVE,
    PARAMETERS,
    WEIGHT_DECAY,
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
from tests.examples.training import BLOCK, MASK_TOKEN, packed, random_sample, tiny_transformer
from tests.jaxpr_shapes import shapes_in
from train.optimizer import decayed
from train.step import (
    Objective,
    accumulate,
    group_norms,
    make_evaluation_step,
    make_train_step,
    prepare,
)
from wedlm_jax.corruption import dual_stream, sample_masks
from wedlm_jax.loss import LossConfig

AR_OBJECTIVE = Objective("ar", BLOCK, None, LossConfig(chunk=CHUNK))


ar_step = make_train_step(GRAPH, optimizer(), AR_OBJECTIVE)


@pytest.fixture(scope="module")
def whole_batch():
    return gradients_of(*global_batch(), steps=1, objective=OBJECTIVE)


@pytest.mark.parametrize("steps", [2, 4])
def test_accumulation_equals_one_big_batch(whole_batch, steps):
    """Also where one micro-batch holds all the targets and another none."""
    assert float(whole_batch[1]["loss"]) > 1
    assert_same(gradients_of(*global_batch(), steps=steps, objective=OBJECTIVE), whole_batch)


SOURCES = jnp.asarray([[0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]], bool)
"""Of the rows of `global_batch`; the third has none of them."""


def of_source(number):
    """`global_batch` with nothing to learn from the rows of other sources."""
    rows, masked, ratio = global_batch()
    own = SOURCES[:, number, None]
    return dataclasses.replace(rows, trainable=rows.trainable & own), masked & own, ratio


def test_losses_by_source_are_those_of_its_rows_alone(whole_batch):
    rows, masked, ratio = global_batch()
    rows = dataclasses.replace(rows, source=SOURCES)
    found = gradients_of(rows, masked, ratio, steps=2, objective=OBJECTIVE)
    by_source = {name: found[1].pop(f"{name}_by_source") for name in ("mlm_loss", "ar_loss")}
    assert_same(found, whole_batch)
    for number in range(3):
        alone = gradients_of(*of_source(number), steps=1, objective=OBJECTIVE)[1]
        for name, values in by_source.items():
            np.testing.assert_allclose(values[number], alone[name], rtol=1e-5, err_msg=name)
            assert (float(values[number]) > 1) == (number < 2)


def test_next_token_losses_by_source_are_those_of_its_rows_alone():
    evaluate = make_evaluation_step(GRAPH, AR_OBJECTIVE)

    def losses(rows):
        return evaluate(PARAMETERS, jax.tree.map(lambda x: micro_batches(x, 2), rows), KEY)

    found = losses(dataclasses.replace(global_batch()[0], source=SOURCES))["ar_loss_by_source"]
    alone = [losses(of_source(number)[0])["ar_loss"] for number in range(3)]
    np.testing.assert_allclose(found, alone, rtol=1e-5)


def test_what_losses_by_source_are_divided_by_is_counted():
    rows = dataclasses.replace(global_batch()[0], source=SOURCES)
    rows = jax.tree.map(lambda x: micro_batches(x, 2), rows)
    for objective in (OBJECTIVE, AR_OBJECTIVE):
        counts = prepare(objective, rows, KEY)[1]
        # Of 13 and 15 tokens, 5, 20 and none; a sample's first token is no target, nor a prompt's.
        np.testing.assert_array_equal(counts["tokens_by_source"], [5, 13 + 15 + 20, 0])
        np.testing.assert_array_equal(counts["ar_by_source"], [4, 12 + 11, 0])
        if "mlm" in counts:
            np.testing.assert_allclose(counts["mlm_by_source"].sum(), counts["mlm"], rtol=1e-6)


@pytest.mark.parametrize("how", [{"remat": "full"}, {"unroll": 2}, {"attention": "dense"}], ids=str)
def test_how_it_is_computed_changes_no_gradient(whole_batch, how):
    loss = dataclasses.replace(OBJECTIVE.loss, **how)
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


def traced_shapes(chunk, attention="streams"):
    loss = LossConfig(chunk=chunk, attention=attention)
    step = make_train_step(GRAPH, optimizer(), dataclasses.replace(OBJECTIVE, loss=loss))
    state, rows = jax.eval_shape(fresh_state), training_rows()
    return set(shapes_in(jax.make_jaxpr(step)(state, rows, KEY).jaxpr))


def rows_of_logits(shapes):
    """The most rows of logits in one array; parameters have the vocabulary's axis too."""
    parameters = {(12, 97), (97,)}
    return max(int(np.prod(s[:-1])) for s in shapes if s[-1:] == (97,) and s not in parameters)


def test_logits_of_a_whole_row_never_exist():
    assert rows_of_logits(traced_shapes(CHUNK)) == CHUNK
    # The measure sees whole rows where the chunk is one.
    assert rows_of_logits(traced_shapes(LENGTH)) == LENGTH


def test_a_mask_over_both_streams_never_exists():
    def square(shapes):
        return any(shape[-2:] == (2 * LENGTH, 2 * LENGTH) for shape in shapes)

    assert not square(traced_shapes(CHUNK))
    assert square(traced_shapes(CHUNK, attention="dense"))


def test_a_step_is_adamw_on_clipped_gradients():
    rows = training_rows()
    batches, denominators, loss = prepare(OBJECTIVE, rows, jax.random.fold_in(KEY, 0))
    gradients = named(accumulate(GRAPH, PARAMETERS, batches, denominators, loss)[0])
    norm = np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in gradients.values()))
    assert norm > CLIP_NORM

    state, metrics = wedlm_step(fresh_state(), rows, KEY)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    assert int(state.step) == 1
    after, is_decayed = named(state.parameters), named(decayed(PARAMETERS))
    for name, before in named(PARAMETERS).items():
        clipped = gradients[name].astype(np.float64) * CLIP_NORM / norm
        mean = (1 - B1) * clipped / (1 - B1)
        square = (1 - B2) * clipped**2 / (1 - B2)
        update = mean / (np.sqrt(square) + EPSILON) + WEIGHT_DECAY * is_decayed[name] * before
        expected = before - LEARNING_RATE * update
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


@pytest.mark.full
@pytest.mark.parametrize("step", [wedlm_step, ar_step], ids=["wedlm", "ar"])
def test_without_a_target_only_the_decay_moves_parameters(step):
    nothing = dataclasses.replace(training_rows(), trainable=jnp.zeros((2, 2, LENGTH), bool))
    state, metrics = step(fresh_state(), nothing, KEY)
    norms = ("parameter_norm", "update_norm")  # the decay's
    rest = {name: value for name, value in metrics.items() if not name.startswith(norms)}
    assert not any(np.any(value) for value in jax.tree.leaves(rest)), rest
    is_decayed, after = named(decayed(PARAMETERS)), named(state.parameters)
    for name, before in named(PARAMETERS).items():
        expected = before * (1 - LEARNING_RATE * WEIGHT_DECAY * is_decayed[name])
        np.testing.assert_allclose(after[name], expected, rtol=1e-6, err_msg=name)


def test_masks_are_named_by_key_and_step():
    def loss(step, key):
        return float(wedlm_step(fresh_state(step), training_rows(), key)[1]["mlm_loss"])

    assert loss(0, KEY) == loss(0, KEY)
    assert loss(0, KEY) != loss(1, KEY)
    assert loss(0, KEY) != loss(0, jax.random.key(12))


def test_equal_rows_draw_masks_of_their_own():
    """In one micro-batch and across them."""
    sample = random_sample(np.random.default_rng(0), LENGTH)
    rows = jax.tree.map(lambda x: micro_batches(x, 2), packed([[sample]] * 4, LENGTH)[0])
    batches, _, _ = prepare(OBJECTIVE, rows, KEY)
    assert len(np.unique(np.asarray(batches.masked).reshape(4, LENGTH), axis=0)) == 4


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_masks_do_not_depend_on_how_a_step_is_cut(steps):
    """A device's memory decides it (`train.remat`), and should not decide what is learned."""
    objective = dataclasses.replace(OBJECTIVE, suffix_share=0.5)
    rows = jax.tree.map(lambda x: micro_batches(x, steps), global_batch()[0])
    masked = prepare(objective, rows, KEY)[0].masked.reshape(-1, LENGTH)
    for number, row in enumerate(masked):
        key = jax.random.split(KEY, len(masked))[number]
        own = jax.tree.map(lambda x, number=number: x[number, None], global_batch()[0])
        drawn, ratio = sample_masks(key, own.trainable, BLOCK, suffix_share=0.5)
        alone = dual_stream(own, drawn, ratio, block_size=BLOCK, mask_token_id=MASK_TOKEN)
        np.testing.assert_array_equal(row, alone.masked[0])
    assert masked.any()


def test_a_run_resumed_from_its_state_is_the_same_run():
    def run(state, steps):
        for step in steps:
            state, _ = wedlm_step(state, training_rows(step), KEY)
        return state

    saved = jax.device_get(run(fresh_state(), range(2)))
    resumed = run(jax.tree.map(jnp.asarray, saved), range(2, 4))
    whole = run(fresh_state(), range(4))
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("step", [wedlm_step, ar_step], ids=["wedlm", "ar"])
def test_steps_on_one_batch_learn_it(step):
    state, rows, losses = fresh_state(), training_rows(), []
    for _ in range(40):
        state, metrics = step(state, rows, KEY)
        losses.append(float(metrics["ar_loss"]))
    assert losses[-1] < 0.5 * losses[0]


def test_the_ar_objective_never_draws_masks():
    first, second = (ar_step(fresh_state(), training_rows(), jax.random.key(k)) for k in (0, 1))
    assert float(first[1]["ar_loss"]) == float(first[1]["loss"])
    assert float(first[1]["loss"]) == float(second[1]["loss"])


def test_wedlm_training_needs_a_mask_token():
    with pytest.raises(ValueError, match="mask_token_id"):
        prepare(dataclasses.replace(OBJECTIVE, mask_token_id=None), training_rows(), KEY)


def test_the_groups_are_all_parameters_and_each_is_its_leaves_norm():
    parameters = nnx.state(tiny_transformer())
    norms = group_norms(parameters, "parameter")
    groups = ("attention", "embedding", "head", "mlp", "norms")
    assert sorted(norms) == [f"parameter_norm_{group}" for group in groups]
    squares = sum(float(np.square(x).sum()) for x in jax.tree.leaves(parameters))
    assert sum(float(x) ** 2 for x in norms.values()) == pytest.approx(squares, rel=1e-5)
    mlp = [
        parameters["layers"]["mlp"][f"{name}_proj"]["weight"][...]
        for name in ("gate", "up", "down")
    ]
    expected = np.sqrt(sum(np.square(x).sum() for x in mlp))
    assert float(norms["parameter_norm_mlp"]) == pytest.approx(expected, rel=1e-5)
