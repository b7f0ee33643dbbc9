"""Keys and values as 8-bit integers: each row of a head has a scale of its own.

What stands in the cache is what is attended to from the beginning, in its own forward too
(`wedlm_jax.layers.Attention`). So it makes no difference whether a token's keys come from the
window, from the same piece of a prompt or from the cache, and a completion depends neither on
pieces and buckets nor, in mode "verified", on the window.
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

    The scales lie apart: beside the values each would take a vector's room on a TPU.

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
    """``x [..., head_dim]`` rounded to the nearest of 255 steps, by the largest of each row."""
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(axis=-1) / LARGEST
    steps = x / jnp.where(scales > 0, scales, 1.0)[..., None]
    return Int8Rows(jnp.round(steps).astype(jnp.int8), scales)


def to_float(rows: Rows, dtype: Any) -> Array:
    """The numbers that the rows stand for; an array as it is."""
    if not isinstance(rows, Int8Rows):
        return rows
    return (rows.values.astype(jnp.float32) * rows.scales[..., None]).astype(dtype)
