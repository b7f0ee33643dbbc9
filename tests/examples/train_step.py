"""A step of a tiny model on random rows: for the tests of steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.examples.training import BLOCK, MASK_TOKEN, packed, random_sample, tiny_transformer
from tests.examples.training import DIVIDED as DIVIDED
from train.optimizer import make_optimizer
from train.recipe.config import OptimizerSection
from train.step import Objective, TrainState, accumulate, make_train_step, prepare_given
from wedlm_jax.loss import LossConfig

LENGTH, CHUNK = 32, 4
ADAMW = OptimizerSection(learning_rate=0.01, weight_decay=0.1, clip_norm=0.5)
KEY = jax.random.key(11)

OBJECTIVE = Objective("wedlm", BLOCK, MASK_TOKEN, LossConfig(chunk=CHUNK), suffix_share=0.5)
GRAPH, PARAMETERS = nnx.split(tiny_transformer())


def optimizer():
    return make_optimizer(optax.constant_schedule(ADAMW.learning_rate), ADAMW)


def fresh_state(step=0, parameters=PARAMETERS, frozen=None):
    """Copies, because the step donates its state."""
    parameters, frozen = jax.tree.map(jnp.array, (parameters, frozen))
    return TrainState(jnp.int32(step), parameters, optimizer().init(parameters), frozen=frozen)


# Compiles once, for [2, 2, L] rows.
wedlm_step = make_train_step(GRAPH, optimizer(), OBJECTIVE)


def run_steps(step, state, batches):
    """What the steps measure, and the state after them, on the host."""
    seen = []
    for batch in batches:
        state, metrics = step(state, batch, KEY)
        seen.append(jax.device_get(metrics))
    return seen, jax.device_get(state)


def micro_batches(x, steps):
    """Splits a batch into A accumulation steps: ``[A * R, L]`` to ``[A, R, L]``."""
    return x.reshape(steps, -1, *x.shape[1:])


def global_batch(seed=0):
    """Four rows that weigh very differently: one full, one short, one prompt, one empty."""
    random = np.random.default_rng(seed)
    full = [random_sample(random, 13), random_sample(random, 15, prompt=4)]
    short, prompt_only = [random_sample(random, 5, prompt=1)], [random_sample(random, 20, 20)]
    return packed([full, short, prompt_only, []], LENGTH)


def training_rows(seed=0):
    return jax.tree.map(lambda x: micro_batches(x, 2), global_batch(seed)[0])


def many_rows(random, prompt):
    """Rows ``[2, 8, 32]`` of samples of many lengths, and masks; ``prompt`` maps the length of a
    sample to that of its prompt."""
    lengths = [(9, 12), (30,), (4, 5, 6), (17, 8)] * 4
    samples = [[random_sample(random, n, prompt=prompt(n)) for n in row] for row in lengths]
    return jax.tree.map(lambda x: x.reshape(2, 8, 32), packed(samples, 32))


def named(tree):
    """The leaves of a tree by their paths, on the host."""
    host = jax.device_get(tree)
    flat, _ = jax.tree_util.tree_flatten_with_path(host, is_leaf=lambda x: x is None)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


@partial(jax.jit, static_argnames=("steps", "objective"))
def gradients_of(rows, masked, ratio, *, steps, objective):
    batch = jax.tree.map(lambda x: micro_batches(x, steps), (rows, masked, ratio))
    return accumulate(GRAPH, PARAMETERS, *prepare_given(objective, *batch))


def assert_same_gradients(ours, theirs):
    """Up to float32 rounding, and none is zero."""
    expected = named(theirs)
    for name, value in named(ours).items():
        scale = np.abs(expected[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(value / scale, expected[name] / scale, atol=2e-5, err_msg=name)


def assert_same(ours, theirs):
    """Gradients and metrics, up to float32 rounding."""
    for name, value in theirs[1].items():
        np.testing.assert_allclose(ours[1][name], value, rtol=1e-5, err_msg=name)
    assert_same_gradients(ours[0], theirs[0])
