"""A step on a mesh of eight devices is the step on one."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.train_step import DIVIDED, KEY, fresh_state, many_rows, optimizer, run_steps
from tests.examples.training import BLOCK, MASK_TOKEN, tiny_transformer
from train.step import Objective, accumulate, make_train_step, prepare
from wedlm_jax.loss import LossConfig
from wedlm_jax.packing import prediction_blocks, trainable_blocks
from wedlm_jax.sharding import batch_sharding, make_mesh, tree_shardings

LENGTH, ROWS, STEPS = 32, 8, 3
MODEL = tiny_transformer(**DIVIDED)
GRAPH, PARAMETERS = nnx.split(MODEL)
LAYOUTS = {
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 2, "tensor": 4},
    "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence": {"fsdp": 2, "tensor": 2, "sequence": 2},
}


def objective(attention):
    return Objective("wedlm", BLOCK, MASK_TOKEN, LossConfig(chunk=8, attention=attention))


@cache
def step_of(attention):
    """One for all tests: what it has compiled for a mesh serves the next."""
    return make_train_step(GRAPH, optimizer(), objective(attention))


@cache
def batches():
    """``[2, R, L]`` per step: samples of many lengths, half of each a prompt, of three sources."""
    random = np.random.default_rng(4)
    steps = []
    for _ in range(STEPS):
        rows, _, _ = many_rows(random, prompt=lambda length: length // 2)
        source = random.integers(0, 3, (2, ROWS, 1)) == np.arange(3)
        steps.append(dataclasses.replace(rows, source=jnp.asarray(source)))
    return steps


def without_prompts(rows):
    """The same batch, with the blocks of prompts left out of the prediction stream."""
    trainable = np.asarray(rows.trainable).reshape(-1, LENGTH)
    room = int(trainable_blocks(trainable, BLOCK).sum(-1).max())
    assert room < LENGTH // BLOCK
    places = np.stack([prediction_blocks(row, BLOCK, room) for row in trainable])
    return dataclasses.replace(rows, prediction_blocks=jnp.asarray(places.reshape(2, ROWS, -1)))


def on_mesh(layout):
    """A mesh, and the first state on it."""
    mesh = make_mesh(LAYOUTS[layout])
    state = fresh_state(parameters=PARAMETERS)
    return mesh, jax.device_put(state, tree_shardings(mesh, state))


@cache
def on_one_device():
    return run_steps(step_of("streams"), fresh_state(parameters=PARAMETERS), batches())


@pytest.mark.parametrize(
    ("layout", "attention", "prompts"),
    [
        ("mixed", "streams", True),
        pytest.param("sequence", "blockwise", False, marks=pytest.mark.full),
        pytest.param("sequence", "blockwise", True, marks=pytest.mark.full),
        *(
            pytest.param(name, "streams", name == "fsdp", marks=pytest.mark.full)
            for name in LAYOUTS
            if name != "mixed"
        ),
    ],
)
def test_losses_gradients_and_parameters_equal_those_of_one_device(layout, attention, prompts):
    """Also where the prompts are not in the prediction stream, and there they are."""
    mesh, state = on_mesh(layout)
    given = batches() if prompts else [without_prompts(batch) for batch in batches()]
    rows = [jax.device_put(batch, batch_sharding(mesh)) for batch in given]
    with jax.set_mesh(mesh):
        losses, state = run_steps(step_of(attention), state, rows)
    expected_losses, expected = on_one_device()
    for own, one in zip(losses, expected_losses, strict=True):
        assert jax.tree.structure(own) == jax.tree.structure(one)
        for path, value in jax.tree.leaves_with_path(one):
            found = dict(jax.tree.leaves_with_path(own))[path]
            np.testing.assert_allclose(found, value, rtol=2e-5, err_msg=jax.tree_util.keystr(path))
    for own, one in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, one, rtol=2e-4, atol=2e-5)


def test_every_matrix_its_gradient_and_its_moments_are_cut_and_stay_so():
    """What stands between backward pass and update is never whole on a device, either."""
    mesh, state = on_mesh("mixed")
    rows = jax.device_put(batches()[0], batch_sharding(mesh))

    @jax.jit
    def gradients(parameters, rows):
        prepared, totals, loss = prepare(objective("streams"), rows, KEY)
        return accumulate(GRAPH, parameters, prepared, totals, loss)[0]

    with jax.set_mesh(mesh):
        found = gradients(state.parameters, rows)
        leaves = map(jax.tree.leaves, (found, state.parameters))
        for gradient, parameter in zip(*leaves, strict=True):
            if gradient.ndim > 1:
                assert gradient.sharding.is_equivalent_to(parameter.sharding, gradient.ndim)
        new_state, _ = step_of("streams")(state, rows, KEY)
    for path, leaf in jax.tree.leaves_with_path(new_state):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shards = {shard.data.shape for shard in leaf.addressable_shards}
        if "weight" in name or "embed_tokens" in name or "lm_head" in name:
            assert {np.prod(shape) for shape in shards} == {leaf.size // 4}, name
        elif "bias" in name:
            # One of a matrix whose outputs are the hidden size is whole, as norms are.
            parts = 1 if "o_proj" in name or "down_proj" in name else 2
            assert {np.prod(shape) for shape in shards} == {leaf.size // parts}, name
        else:
            assert shards == {leaf.shape}, name
