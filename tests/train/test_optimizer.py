"""The optimizers: what decays, and what Muon does to which parameters."""

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


def made(schedule, name="adamw", decay=0.0, **more):
    settings = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "clip_norm": 1e9}
    return make_optimizer(
        schedule, OptimizerSection(name=name, weight_decay=decay, **settings, **more)
    )


def random_gradients(seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), PARAMETERS)


def updates_of(name, gradients, decay=0.0):
    optimizer = made(optax.constant_schedule(RATE), name, decay)
    updates, _ = optimizer.update(gradients, optimizer.init(PARAMETERS), PARAMETERS, step=FIRST)
    return {path: np.asarray(leaf) for path, leaf in named(updates).items()}


def is_layer_matrix(path):
    return path.startswith("layers/") and "weight" in path


def test_decay_is_for_matrices_only():
    flags = named(decayed(PARAMETERS))
    # Every weight matrix, and nothing else, has two axes beside that of the layers.
    for path, value in named(PARAMETERS).items():
        assert flags[path] == (value.ndim - ("layers" in path) == 2), path
    assert sum(flags.values()) == 9  # seven matrices of a layer, embedding and head
    assert len(flags) == 9 + 12  # two norms, q and k norm, a bias of each matrix, the last norm


@pytest.mark.full
def test_muon_orthogonalises_the_matrix_of_every_layer():
    updates = updates_of("muon", random_gradients(0))
    seen = 0
    for path, update in updates.items():
        if not is_layer_matrix(path):
            continue
        for matrix in update / -RATE:
            values = np.linalg.svd(matrix, compute_uv=False)
            # Five Newton-Schulz turns bring singular values near 1, not to 1; the scale makes
            # the root mean square of the entries that of AdamW.
            scale = MUON_RMS * max(matrix.shape) ** 0.5
            assert (values > 0.5 * scale).all(), path
            assert (values < 1.3 * scale).all(), path
            seen += 1
    assert seen == 7 * tiny_transformer().config.num_hidden_layers


def test_muon_takes_each_layer_by_itself():
    gradients = random_gradients(1)
    turned = jax.tree_util.tree_map_with_path(
        lambda path, x: x[::-1] if "layers" in jax.tree_util.keystr(path) else x, gradients
    )
    straight, reversed_ = updates_of("muon", gradients), updates_of("muon", turned)
    for path in filter(is_layer_matrix, straight):
        np.testing.assert_allclose(straight[path], reversed_[path][::-1], atol=1e-6)


def test_muon_leaves_the_rest_to_adamw():
    gradients = random_gradients(2)
    muon, adamw = updates_of("muon", gradients, DECAY), updates_of("adamw", gradients)
    rest = [path for path in muon if not is_layer_matrix(path)]
    assert len(rest) == len(muon) - 7
    for path in rest:
        # Adam's first step is the sign of the gradient, with Nesterov's momentum or without.
        np.testing.assert_allclose(np.sign(muon[path]), np.sign(adamw[path]), err_msg=path)
        np.testing.assert_allclose(muon[path], adamw[path], rtol=0.5, err_msg=path)


def test_muon_decays_its_own_matrices():
    gradients = random_gradients(3)
    with_decay, without = updates_of("muon", gradients, DECAY), updates_of("muon", gradients)
    for path, parameter in named(PARAMETERS).items():
        expected = -RATE * DECAY * np.asarray(parameter) * is_layer_matrix(path)
        np.testing.assert_allclose(with_decay[path] - without[path], expected, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_learning_rate_is_that_of_the_step_and_nothing_else_counts_steps(name):
    """Updates 1, 2, 3 of steps 0, 1, 5: those of a constant rate, scaled by each step's own."""
    gradients = random_gradients(2)
    plain = made(optax.constant_schedule(1.0), name, DECAY)
    scheduled = made(lambda step: RATE * (1 + step), name, DECAY)
    state, other = scheduled.init(PARAMETERS), plain.init(PARAMETERS)
    for step in (0, 1, 5):
        updates, state = scheduled.update(gradients, state, PARAMETERS, step=jnp.int32(step))
        ones, other = plain.update(gradients, other, PARAMETERS, step=FIRST)
        expected = named(ones)
        for path, update in named(updates).items():
            np.testing.assert_allclose(update, RATE * (1 + step) * expected[path], rtol=1e-6)
    counts = optax.tree_utils.tree_get_all_with_path(state, "count")
    assert {int(count) for _, count in counts} == {3}


def test_first_moments_in_bfloat16_take_half_the_bytes_and_hardly_change_the_update():
    gradients = random_gradients(3)
    for name in ("adamw", "muon"):
        found = {}
        for dtype in ("float32", "bfloat16"):
            optimizer = made(optax.constant_schedule(RATE), name, first_moment_dtype=dtype)
            state = optimizer.init(PARAMETERS)
            kept = {leaf.dtype.name for leaf in jax.tree.leaves(state)} - {"int32"}
            assert kept == {"float32", dtype}, name
            updates, _ = optimizer.update(gradients, state, PARAMETERS, step=FIRST)
            found[dtype] = named(updates)
        for path, update in found["float32"].items():
            np.testing.assert_allclose(update, found["bfloat16"][path], atol=RATE / 50)


def test_the_average_of_the_parameters_follows_its_recurrence():
    optimizer = made(optax.constant_schedule(RATE), average=0.3)
    plain = made(optax.constant_schedule(RATE))
    weights = {"kernel": jnp.arange(4.0)}
    assert averaged_parameters(plain.init(weights), weights) is weights
    state, other = optimizer.init(weights), plain.init(weights)
    expected = np.arange(4.0)
    for step in range(8):
        gradients = {"kernel": jnp.sin(jnp.arange(4.0) + step)}
        updates, state = optimizer.update(gradients, state, weights, step=FIRST)
        same, other = plain.update(gradients, other, weights, step=FIRST)
        np.testing.assert_array_equal(updates["kernel"], same["kernel"])
        weights = optax.apply_updates(weights, updates)
        decay = min(0.3, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * np.asarray(weights["kernel"])
    assert decay == 0.3
    found = averaged_parameters(state, weights)["kernel"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not np.allclose(found, weights["kernel"])
