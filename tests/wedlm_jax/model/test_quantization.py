"""Products with matrices on the left, of few columns: exact, and without a copy of the matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from wedlm_jax.model.quantization import left_product, rounded
from wedlm_jax.sharding import make_mesh

OUT, IN = 96, 64


def operands(columns, dtype):
    random = np.random.default_rng(columns)
    matrix = jnp.asarray(random.normal(size=(OUT, IN)), dtype)
    return matrix, jnp.asarray(random.normal(size=(IN, columns)), dtype)


def exact(matrix, x):
    return np.asarray(matrix, np.float64) @ np.asarray(x, np.float64)


@pytest.mark.parametrize("columns", [1, 4, 21])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_that_of_numpy(columns, dtype):
    matrix, x = operands(columns, dtype)
    y = jax.jit(left_product, static_argnames="dtype")(matrix, x, dtype="float32")
    assert y.shape == (OUT, columns)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact(matrix, x), atol=1e-4)  # sums are in float32


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


@pytest.mark.parametrize("cut", [("tensor", None), (None, "tensor")])
@pytest.mark.parametrize(("columns", "dtype"), [(1, "bfloat16"), (21, "float32")])
def test_a_product_over_devices_is_that_of_one(columns, dtype, cut):
    matrix, x = operands(columns, dtype)
    mesh = make_mesh({"tensor": -1})
    matrix = jax.device_put(matrix, NamedSharding(mesh, PartitionSpec(*cut)))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(cut[1], None)))
    with jax.set_mesh(mesh):
        y = jax.jit(left_product, static_argnames="dtype")(matrix, x, dtype="float32")
    np.testing.assert_allclose(y, exact(matrix, x), atol=1e-4)


@pytest.mark.parametrize("columns", [1, 3, 16])
def test_a_matrix_in_bfloat16_is_multiplied_as_it_lies(columns):
    """XLA would cast a transposed or a lone column's matrix whole, in every forward."""
    matrix, x = operands(columns, "bfloat16")
    program = jax.jit(lambda m, rows: left_product(m, rows.T, "float32").T)
    text = program.lower(matrix, x.T).compile().as_text()
    assert f"bf16[{OUT},{IN}]" in text
    assert f"f32[{OUT},{IN}]" not in text
