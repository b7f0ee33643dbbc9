"""Quantizes matrix products to 8-bit integers, with qwix.

For decoding, the weights of the layers and an untied output projection are rounded, with a scale
for each output of each matrix. Products run in the compute dtype, to which the integers are cast:
this saves memory and the time to read it.

For training, `int8_product` rounds both operands of each product, forward and backward, with a
scale for each token and each output. Parameters, sums of gradients and everything between the
matrices keep their dtypes. A TPU multiplies integers twice as fast as bfloat16 (v5e, v5p, v6e).
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint

from wedlm_jax.errors import InputError, require_extra

QUANTIZATIONS = ("int8",)

Model = TypeVar("Model", bound=nnx.Module)


def check_quantization(name: str | None) -> None:
    """Refuses, with an `InputError`, a name that is not in `QUANTIZATIONS`, or any but None if qwix
    is not installed."""
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise InputError(f"quantization: expected one of {', '.join(QUANTIZATIONS)}, not {name!r}")
    require_extra("quantization", "int8", "qwix")


def is_quantized(matrix: Any) -> bool:
    return hasattr(matrix, "qvalue")


def product(x: Array, matrix: Any, dtype: Any = None) -> Array:
    """Returns ``x [..., in] @ matrix.T`` for a matrix ``[out, in]``, which may be quantized;
    computed in the dtype of ``x``, accumulated and returned in ``dtype``."""
    return _dot(x, matrix.astype(x.dtype), x.ndim - 1, 1, dtype)


def _dot(x: Any, y: Any, x_axis: int, y_axis: int, dtype: Any) -> Array:
    """Sums ``x * y`` over an axis of each."""
    summed = (((x_axis,), (y_axis,)), ((), ()))
    if not (is_quantized(x) or is_quantized(y)):
        return jax.lax.dot_general(x, y, summed, preferred_element_type=dtype)
    import qwix

    result = qwix.dot_general(x, y, summed)
    return result if dtype is None else result.astype(dtype)


def matrix_rows(matrix: Any, rows: Array, dtype: Any) -> Array:
    """Returns the ``rows`` with these numbers, in ``dtype``, of a matrix ``[out, in]`` that may be
    quantized."""
    if not is_quantized(matrix):
        taken: Array = matrix[rows]
        return taken.astype(dtype)
    return (matrix.qvalue[rows] * matrix.scale[rows]).astype(dtype)


def left_product(matrix: Any, x: Array, dtype: Any = None) -> Array:
    """Returns ``matrix [out, in] @ x [in, T]`` for a matrix that may be quantized; computed in the
    dtype of ``x``, accumulated and returned in ``dtype``.

    This is for CPUs, whose matrix product repacks its right operand in each call. The few columns
    of ``x`` are cheap to repack; a large matrix takes as long to repack as to multiply.
    """
    columns = x.shape[1]
    if x.dtype != jnp.float32:
        x = jnp.pad(x, ((0, 0), (0, max(FEWEST_COLUMNS - columns, 0))))
        # XLA would also cast the whole matrix for transposed rows that are not laid out as columns.
        x = with_layout_constraint(x, Layout((0, 1)))
    y = _dot(matrix.astype(x.dtype), x, 1, 0, dtype)
    # Without the barrier XLA merges this product with a transposition after it, which puts the
    # matrix on the right again, or in bfloat16 with a cast, for which it casts the whole matrix.
    return jax.lax.optimization_barrier(y)[:, :columns]


def int8_product(x: Array, matrix: Array) -> Array:
    """Returns ``x [..., in] @ matrix.T`` for a matrix ``[out, in]``, rounded to 8 bits, in the
    dtype of ``x``. Must be called from a method of a module with a ``qwix_path``, for which qwix
    searches the stack."""
    import qwix

    # qwix's usual way is to patch `jax.lax.dot_general` for the duration of a call. JAX caches what
    # it traces then within `jnp.matmul`, and would use it in models that must not be rounded.
    int8 = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8)
    summed = (((x.ndim - 1,), (1,)), ((), ()))
    product = qwix.QtProvider([int8]).dot_general(x, matrix.astype(x.dtype), summed)
    assert isinstance(product, Array)
    return product


FEWEST_COLUMNS = 4
"""Fewest columns in bfloat16: for one, XLA casts the whole matrix to float32 in each call."""

ROUNDED = ("weight", "lm_head")
"""Names of the parameters that are rounded."""


def rounded(matrix: Array) -> Any:
    """Rounds a matrix ``[..., out, in]`` to integers with a scale for each output."""
    import qwix

    return qwix.quantize(matrix, jnp.int8, channelwise_axes=range(matrix.ndim - 1))


_rounded = jax.jit(rounded)


def rounded_alone(value: Array, name: str) -> Any:
    """Rounds a parameter named in `ROUNDED` and deletes the original; returns others unchanged."""
    if name not in ROUNDED:
        return value
    result = jax.block_until_ready(_rounded(value))
    value.delete()
    return result


def quantize_weights(model: Model) -> Model:
    """Returns a `wedlm_jax.model.Transformer`, on one device or on a mesh, with its matrices
    rounded; ``model`` itself is not changed."""
    graph, parameters = nnx.split(model)
    return nnx.merge(graph, _all_rounded(parameters))


@jax.jit
def _all_rounded(parameters: nnx.State) -> nnx.State:
    def one(path: tuple[Any, ...], parameter: Any) -> Any:
        return parameter.replace(rounded(parameter[...])) if path[-1] in ROUNDED else parameter

    flat = parameters.flat_state()
    return nnx.State.from_flat_path({path: one(path, leaf) for path, leaf in flat})
