"""Training with products of 8-bit integers, by qwix: forward, and both products backward.

Parameters, their sums of gradients and everything between the layers' matrices stay as they are.
Before a product both operands are rounded to integers, with a scale for each token and each output;
so is the gradient that comes back, for either product that it enters. A TPU multiplies integers
twice as fast as bfloat16 (v5e, v5p, v6e).
"""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.model.layers import Linear

Model = TypeVar("Model", bound=nnx.Module)


def int8_product(x: Array, matrix: Array) -> Array:
    """Returns ``x [..., in] @ matrix.T``, the matrix ``[out, in]``, in the dtype of ``x``, as
    the module says.

    To be called from a module's method, which qwix finds on the stack to ask for its ``qwix_path``.
    """
    import qwix

    # qwix would rather patch `jax.lax.dot_general` for the duration of a call. What JAX then traces
    # within `jnp.matmul` it remembers, and uses in models that are not to be rounded.
    int8 = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8)
    summed = (((x.ndim - 1,), (1,)), ((), ()))
    product = qwix.QtProvider([int8]).dot_general(x, matrix.astype(x.dtype), summed)
    assert isinstance(product, Array)
    return product


def with_int8_products(model: Model) -> Model:
    """Lets the layers' matrices multiply integers, and returns the model, which is changed.

    Adapters and the output projection compute as before."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.product = int8_product
    return model
