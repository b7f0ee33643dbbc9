"""Looks tokens up in the embedding."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.sharding import constrain


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def looked_up(table: Array, tokens: Array, dtype: jnp.dtype) -> Array:
    """Returns the rows of ``table [V, D]`` for ``tokens``, in ``dtype``.

    Each device looks up whole rows in its share of the vocabulary. They are gathered in the smaller
    dtype, which halves memory and traffic for float32 parameters and bfloat16 states. The table's
    gradient is nevertheless summed in the table's dtype; the plain derivative would sum in
    ``dtype``.
    """
    smaller = min(table.dtype, dtype, key=lambda kind: kind.itemsize)
    return constrain(table.astype(smaller), "vocab", None)[tokens].astype(dtype)


def _forward(table: Array, tokens: Array, dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    # The empty array carries the table's shape and dtype.
    return looked_up(table, tokens, dtype), (tokens, jnp.zeros((0, *table.shape), table.dtype))


def _backward(_: jnp.dtype, saved: tuple[Array, Array], by_rows: Array) -> tuple[Array, None]:
    tokens, like = saved
    zeros = constrain(jnp.zeros(like.shape[1:], like.dtype), "vocab", None)
    return zeros.at[tokens].add(by_rows.astype(like.dtype)), None


looked_up.defvjp(_forward, _backward)
