"""Keys and values as 8-bit integers, with a scale for each head of each token.

Keys and values are rounded before their first use: a forward attends even to its own tokens with
the rounding of the cache. So it makes no difference whether a token's keys come from the window,
the same prompt chunk or the cache, and a completion depends neither on chunks and sizes nor, in
mode "verified", on the window.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

LARGEST = 127.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Rows:
    """``values [..., head_dim] * scales [...]``.

    The scales are separate: among the values, each would take a whole vector's space on a TPU.

    Attributes:
      values: int8 ``[..., head_dim]``, −127 to 127.
      scales: float32 ``[...]``.
    """

    values: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Rows = Array | Int8Rows
"""Keys or values, ``[..., head_dim]``."""


def to_int8(x: Array) -> Int8Rows:
    """Rounds ``x [..., head_dim]`` to 255 steps, scaled by the largest magnitude of each row."""
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(axis=-1) / LARGEST
    steps = x / jnp.where(scales > 0, scales, 1.0)[..., None]
    return Int8Rows(jnp.round(steps).astype(jnp.int8), scales)


def to_float(rows: Rows, dtype: Any) -> Array:
    """Returns the rows as floats; a float array unchanged."""
    if not isinstance(rows, Int8Rows):
        return rows
    return (rows.values.astype(jnp.float32) * rows.scales[..., None]).astype(dtype)
