"""Products of 8-bit integers in training: what they compute, and where."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.examples.training import tiny_transformer
from tests.jaxpr_shapes import equations_in
from wedlm_jax.masks import CausalMask
from wedlm_jax.model.layers import Linear, with_int8_products
from wedlm_jax.model.lora import LoraConfig, with_adapters

TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, 97)


def rounded(x, axis):
    """Integers up to 127 times a scale, which the largest along ``axis`` decides."""
    scale = x.max(axis, keepdims=True) / 127.5
    # The largest is not negative here: -127.5 is -128 or -127, by the last bit of a quotient.
    assert (np.abs(x) < 127 * scale).sum() + scale.size == x.size
    return np.round(x / scale).clip(-128, 127) * scale


@pytest.mark.parametrize("devices", [1, 4])
def test_product_and_gradients_are_those_of_rounded_operands(devices):
    """A scale is of a whole row, wherever its parts lie."""
    random = np.random.default_rng(0)
    normal = (random.normal(size=s).astype("float32") for s in ((2, 5, 16), (6, 16), (2, 5, 6)))
    x, w, g = (np.where(value < 0, value / 8, value) for value in normal)
    linear = Linear(16, 6, bias=False, scale=1.0, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    graph, state = nnx.split(with_int8_products(linear))

    def product(x, w):
        return nnx.merge(graph, jax.tree.map(lambda _: w, state))(x)

    @jax.jit
    def both(x, w, g):
        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(g)

    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, devices // 2 or 1), ("rows", "sums"))
    cuts = [PartitionSpec("rows", None, "sums"), PartitionSpec(None, "sums"), PartitionSpec("rows")]
    placed = [
        jax.device_put(v, NamedSharding(mesh, c)) for v, c in zip((x, w, g), cuts, strict=True)
    ]
    y, *gradients = both(*placed)
    x8, w8 = rounded(x, -1), rounded(w, 1)
    np.testing.assert_allclose(y, x8 @ w8.T, rtol=1e-5, atol=1e-5)
    # The scales of what the gradient meets are taken into it before it is rounded.
    w_scale = np.abs(w).max(1) / 127.5
    x_scale = np.abs(x).max(-1, keepdims=True) / 127.5
    by_x = rounded(g * w_scale, -1) @ np.round(w8 / w_scale[:, None])
    by_w = np.einsum("btd,btf->fd", np.round(x8 / x_scale), rounded(g * x_scale, (0, 1)))
    for ours, theirs in zip(gradients, (by_x, by_w), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def loss(model):
    positions = jnp.tile(jnp.arange(8), (2, 1))
    mask = CausalMask(jnp.ones((2, 8), jnp.int32))
    hidden = model(TOKENS, positions, mask, dtype=jnp.dtype("bfloat16"), remat="full")
    return jnp.square(model.logits(hidden)).mean()


def products(model):
    """How many products of which dtypes there are, forward and backward."""
    graph, *states = nnx.split(model, nnx.LoRAParam, ...)
    trained = 0 if jax.tree.leaves(states[0]) else 1

    def of_trained(parameters):
        return loss(nnx.merge(graph, parameters, states[1 - trained]))

    traced = jax.make_jaxpr(jax.value_and_grad(of_trained))(states[trained])
    return Counter(
        "x".join(variable.aval.dtype.name for variable in equation.invars)
        for equation in equations_in(traced.jaxpr)
        if equation.primitive.name == "dot_general"
    )


def test_the_seven_matrices_multiply_integers_and_nothing_else_does():
    plain, int8 = products(tiny_transformer()), products(with_int8_products(tiny_transformer()))
    # Forward, but for the last one again under this policy, and two backward.
    assert int8["int8xint8"] == 7 + 6 + 2 * 7
    assert plain["int8xint8"] == 0
    assert sum(int8.values()) == sum(plain.values())
    # A model that is made after one that rounds does not round.
    assert products(tiny_transformer()) == plain


def test_adapters_beside_rounded_matrices_compute_as_before():
    lora = LoraConfig(2, 4.0)
    plain = products(with_adapters(tiny_transformer(), lora, nnx.Rngs(0)))
    both = products(with_int8_products(with_adapters(tiny_transformer(), lora, nnx.Rngs(0))))
    assert both["int8xint8"] >= 7 + 6 + 7
    assert both["int8xint8"] + both["bfloat16xbfloat16"] >= plain["bfloat16xbfloat16"]
