"""Weights as 8-bit integers, by qwix: a scale for each output of each matrix.

The matrices of the layers and an output projection of its own are rounded; embeddings, norms and
biases stay as they are, and so does a head that is the embedding transposed. Products are those
of the compute dtype with the integers cast to it: what is saved is memory, and the time to read
it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from wedlm_jax.errors import InputError

QUANTIZATIONS = ("int8",)

Model = TypeVar("Model", bound=nnx.Module)


def check_quantization(name: str | None) -> None:
    """Refuses a name that is none of `QUANTIZATIONS` (None: no quantization).

    Raises:
      InputError: it is not, or qwix is not installed.
    """
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise InputError(f"quantization: expected one of {', '.join(QUANTIZATIONS)}, not {name!r}")
    try:
        import qwix  # noqa: F401
    except ImportError:
        raise InputError(
            'quantization needs qwix, which is not installed: pip install "wedlm-jax[int8]"'
        ) from None


def is_quantized(matrix: Any) -> bool:
    return hasattr(matrix, "qvalue")


def product(x: Array, matrix: Any) -> Array:
    """``x [..., in] @ matrix [in, out]`` in the dtype of ``x``; the matrix may be quantized."""
    if not is_quantized(matrix):
        return x @ matrix.astype(x.dtype)
    import qwix

    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    return qwix.dot_general(x, matrix.astype(x.dtype), contracted)


def quantize_weights(model: Model) -> Model:
    """The model with its matrices rounded; ``model`` itself is not changed.

    Args:
      model: a `wedlm_jax.model.Transformer`, on one device or on a mesh.
    """
    import qwix

    graph, parameters = nnx.split(model)

    @jax.jit
    def rounded(parameters: nnx.State) -> nnx.State:
        def one(path: tuple[Any, ...], parameter: Any) -> Any:
            if path[-1] not in ("kernel", "lm_head"):
                return parameter
            matrix = parameter[...]
            # An axis of layers stands before those of the matrix.
            apart = [axis for axis in range(matrix.ndim) if axis != matrix.ndim - 2]
            return parameter.replace(qwix.quantize(matrix, jnp.int8, channelwise_axes=apart))

        flat = parameters.flat_state()
        return nnx.State.from_flat_path({path: one(path, leaf) for path, leaf in flat})

    return nnx.merge(graph, rounded(parameters))
