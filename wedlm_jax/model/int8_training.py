"""Training with products of 8-bit integers, by qwix: the forward product and both backward ones.

Parameters, sums of gradients and everything between the layers' matrices keep their dtypes. Before
a product both operands are rounded to integers, with a scale for each token and each output; so is
the gradient that comes back, for each of its two products. A TPU multiplies integers twice as fast
as bfloat16 (v5e, v5p, v6e).
"""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.model.layers import Linear

Model = TypeVar("Model", bound=nnx.Module)


def int8_product(x: Array, matrix: Array) -> Array:
    """Returns ``x [..., in] @ matrix.T`` for a matrix ``[out, in]``, rounded to 8 bits, in the
    dtype of ``x``.

    Must be called from a module's method: qwix searches the stack for a module with a
    ``qwix_path``.
    """
    import qwix

    # qwix's usual way is to patch `jax.lax.dot_general` for the duration of a call. JAX caches what
    # it traces then within `jnp.matmul`, and would use it in models that must not be rounded.
    int8 = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8)
    summed = (((x.ndim - 1,), (1,)), ((), ()))
    product = qwix.QtProvider([int8]).dot_general(x, matrix.astype(x.dtype), summed)
    assert isinstance(product, Array)
    return product


def with_int8_products(model: Model) -> Model:
    """Changes the model's layers to multiply integers, and returns the model.

    Adapters and the output projection compute as before."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.product = int8_product
    return model
