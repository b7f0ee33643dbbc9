"""Products of matrices that are rounded or on the left: exact, and without a copy of the matrix;
and products of 8-bit integers in training: what they compute, and where."""

import contextlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.examples.training import tiny_transformer
from tests.jaxpr_shapes import equations_in
from wedlm_jax.masks import CausalMask
from wedlm_jax.model.layers import Linear, with_int8_products
from wedlm_jax.model.lora import LoraConfig, with_adapters
from wedlm_jax.model.quantization import left_product, rounded
from wedlm_jax.sharding import make_mesh

OUT, IN = 96, 64


def operands(columns, dtype):
    random = np.random.default_rng(columns)
    matrix = jnp.asarray(random.normal(size=(OUT, IN)), dtype)
    return matrix, jnp.asarray(random.normal(size=(IN, columns)), dtype)


def exact(matrix, x):
    return np.asarray(matrix, np.float64) @ np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_with_integers_is_that_of_what_they_stand_for(dtype):
    matrix, x = operands(3, dtype)
    integers = rounded(matrix)
    y = jax.jit(left_product, static_argnames="dtype")(integers, x, dtype="float32")
    steps = np.asarray(integers.qvalue, np.float64) * np.asarray(integers.scale, np.float64)
    expected = steps @ np.asarray(x, np.float64)
    # In bfloat16 the sums are rounded before and after they are scaled: twice half a step.
    rounding = {"float32": 1e-6, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(y, expected, atol=rounding * np.abs(expected).max())


@pytest.mark.parametrize("cut", [None, ("tensor", None), (None, "tensor")])
@pytest.mark.parametrize(("columns", "dtype"), [(1, "bfloat16"), (4, "bfloat16"), (21, "float32")])
def test_a_product_is_that_of_numpy_on_one_device_and_over_many(columns, dtype, cut):
    matrix, x = operands(columns, dtype)
    expected, mesh = exact(matrix, x), make_mesh({"tensor": -1})
    if cut is not None:
        matrix = jax.device_put(matrix, NamedSharding(mesh, P(*cut)))
        x = jax.device_put(x, NamedSharding(mesh, P(cut[1], None)))
    with contextlib.nullcontext() if cut is None else jax.set_mesh(mesh):
        y = jax.jit(left_product, static_argnames="dtype")(matrix, x, dtype="float32")
    assert (y.shape, y.dtype) == ((OUT, columns), jnp.float32)
    np.testing.assert_allclose(y, expected, atol=1e-4)  # sums are in float32


@pytest.mark.parametrize("columns", [1, 3, 16])
def test_a_matrix_in_bfloat16_is_multiplied_as_it_lies(columns):
    """XLA would cast a transposed or a lone column's matrix whole, in every forward."""
    matrix, x = operands(columns, "bfloat16")
    program = jax.jit(lambda m, rows: left_product(m, rows.T, "float32").T)
    text = program.lower(matrix, x.T).compile().as_text()
    assert f"bf16[{OUT},{IN}]" in text
    assert f"f32[{OUT},{IN}]" not in text


# --- training ----------------------------------------------------------------------------

TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, 97)


def by_hand(x, axis):
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
    cuts = P("rows", None, "sums"), P(None, "sums"), P("rows")
    places = tuple(NamedSharding(mesh, cut) for cut in cuts)
    y, *gradients = both(*jax.device_put((x, w, g), places))
    x8, w8 = by_hand(x, -1), by_hand(w, 1)
    np.testing.assert_allclose(y, x8 @ w8.T, rtol=1e-5, atol=1e-5)
    # The scales of what the gradient meets are taken into it before it is rounded.
    w_scale = np.abs(w).max(1) / 127.5
    x_scale = np.abs(x).max(-1, keepdims=True) / 127.5
    by_x = by_hand(g * w_scale, -1) @ np.round(w8 / w_scale[:, None])
    by_w = np.einsum("btd,btf->fd", np.round(x8 / x_scale), by_hand(g * x_scale, (0, 1)))
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
