"""The optimizers: what decays, and what Muon does to which parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.examples.train_step import named
from tests.examples.training import tiny_transformer
from train.optimizer import MUON_RMS, averaged_parameters, decayed, make_optimizer
from train.recipe.config import OptimizerSection

PARAMETERS = nnx.state(tiny_transformer())
RATE, DECAY = 0.01, 0.1
FIRST = jnp.int32(0)


def random_gradients():
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), PARAMETERS)


GRADIENTS = random_gradients()


def made(schedule, name="adamw", decay=DECAY, **more):
    settings = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "clip_norm": 1e9}
    return make_optimizer(
        schedule, OptimizerSection(name=name, weight_decay=decay, **settings, **more)
    )


@functools.cache
def rising(name, **more):
    """An optimizer whose rate is `RATE` at step 0 and rises: its first state, its jitted update."""
    optimizer = made(lambda step: RATE * (1 + step), name, **more)
    return optimizer.init(PARAMETERS), jax.jit(optimizer.update)


@functools.cache
def first_update(name, **more):
    """Updates by path, and the optimizer's state after them."""
    state, update = rising(name, **more)
    updates, state = update(GRADIENTS, state, PARAMETERS, step=FIRST)
    return named(updates), state


def is_layer_matrix(path):
    return path.startswith("layers/") and "weight" in path


def test_decay_is_for_matrices_only():
    flags = named(decayed(PARAMETERS))
    # Every weight matrix, and nothing else, has two axes beside that of the layers.
    for path, value in named(PARAMETERS).items():
        assert flags[path] == (value.ndim - ("layers" in path) == 2), path
    assert sum(flags.values()) == 9  # seven matrices of a layer, embedding and head
    assert len(flags) == 9 + 12  # two norms, q and k norm, a bias of each matrix, the last norm


def test_muon_orthogonalises_the_matrix_of_every_layer():
    matrices = {
        path: x for path, x in first_update("muon", decay=0.0)[0].items() if is_layer_matrix(path)
    }
    assert len(matrices) == 7
    for path, update in matrices.items():
        assert len(update) == tiny_transformer().config.num_hidden_layers
        for matrix in update / -RATE:
            values = np.linalg.svd(matrix, compute_uv=False)
            # Five Newton-Schulz turns bring singular values near 1, not to 1; the scale makes
            # the root mean square of the entries that of AdamW.
            scale = MUON_RMS * max(matrix.shape) ** 0.5
            assert (values > 0.5 * scale).all(), path
            assert (values < 1.3 * scale).all(), path


def test_muon_decays_its_own_matrices_and_leaves_the_rest_to_adamw():
    (muon, _), (adamw, _) = first_update("muon", decay=0.0), first_update("adamw")
    with_decay, _ = first_update("muon")
    is_decayed = named(decayed(PARAMETERS))
    for path, parameter in named(PARAMETERS).items():
        decay = -RATE * DECAY * np.asarray(parameter)
        expected = decay * is_layer_matrix(path)
        np.testing.assert_allclose(with_decay[path] - muon[path], expected, atol=1e-7)
        if not is_layer_matrix(path):
            # Adam's first step is the sign of the gradient, with Nesterov's momentum or without.
            plain = adamw[path] - decay * is_decayed[path]
            np.testing.assert_allclose(np.sign(muon[path]), np.sign(plain), err_msg=path)
            np.testing.assert_allclose(muon[path], plain, rtol=0.5, err_msg=path)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_learning_rate_is_that_of_the_step_and_nothing_else_counts_steps(name):
    """Updates 1, 2, 3 of steps 0, 1, 5: those of step 0, scaled by each step's own rate."""
    first, update = rising(name)
    state = other = first
    for step in (0, 1, 5):
        updates, state = update(GRADIENTS, state, PARAMETERS, step=jnp.int32(step))
        ones, other = update(GRADIENTS, other, PARAMETERS, step=FIRST)
        expected = named(ones)
        for path, value in named(updates).items():
            np.testing.assert_allclose(value, (1 + step) * expected[path], rtol=1e-6)
        assert all(np.abs(value).max() > RATE / 10 for value in expected.values())
    counts = optax.tree_utils.tree_get_all_with_path(state, "count")
    assert {int(count) for _, count in counts} == {3}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_first_moments_in_bfloat16_take_half_the_bytes_and_hardly_change_the_update(name):
    updates, _ = first_update(name)
    rounded, state = first_update(name, first_moment_dtype="bfloat16")
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state)} - {"int32"}
    assert dtypes == {"float32", "bfloat16"}
    for path, update in updates.items():
        np.testing.assert_allclose(update, rounded[path], atol=RATE / 50)


def test_the_average_of_the_parameters_follows_its_recurrence():
    optimizer = made(optax.constant_schedule(RATE), average=0.3)
    plain = made(optax.constant_schedule(RATE))
    weights = {"kernel": jnp.arange(4.0)}
    assert averaged_parameters(plain.init(weights), weights) is weights
    state, other = optimizer.init(weights), plain.init(weights)
    expected = np.arange(4.0)
    update, update_plain = jax.jit(optimizer.update), jax.jit(plain.update)
    for step in range(8):
        gradients = {"kernel": jnp.sin(jnp.arange(4.0) + step)}
        updates, state = update(gradients, state, weights, step=FIRST)
        same, other = update_plain(gradients, other, weights, step=FIRST)
        np.testing.assert_array_equal(updates["kernel"], same["kernel"])
        weights = optax.apply_updates(weights, updates)
        decay = min(0.3, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * np.asarray(weights["kernel"])
    assert decay == 0.3
    found = averaged_parameters(state, weights)["kernel"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not np.allclose(found, weights["kernel"])
