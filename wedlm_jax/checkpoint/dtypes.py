"""The dtypes that weights are stored in, and exact or refused casts between them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from wedlm_jax.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")


def numpy_dtype(name: str | None) -> np.dtype | None:
    """Returns the dtype called "float32", "bfloat16" or "float16"; None for None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, not {name!r}")
    return np.dtype(getattr(ml_dtypes, name, name))


def cast(name: str, tensor: np.ndarray, dtype: Any) -> np.ndarray:
    """Converts ``tensor`` to ``dtype``.

    Raises:
      InputError: it holds finite values that this dtype cannot (float16 ends at 65504).
    """
    if dtype is None or tensor.dtype == dtype:
        return tensor
    with np.errstate(over="ignore"):
        result = tensor.astype(dtype)
    if np.dtype(dtype).name != "float32" and np.any(np.isinf(result) & np.isfinite(tensor)):
        raise InputError(
            f"tensor {name!r} holds values too large for {np.dtype(dtype).name}; use bfloat16"
        )
    return result


def bits(array: np.ndarray) -> np.ndarray:
    """Views the same memory as unsigned integers: NumPy moves these several times faster than
    dtypes that are not its own."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))
