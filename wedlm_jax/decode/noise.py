"""Gumbel noise for a whole vocabulary: the numbers of `jax.random.gumbel`, many times faster on
a CPU.

There JAX computes its random bits (Threefry-2x32, Salmon et al., 2011) in rolled loops, whose
arrays pass through memory at every turn. Unrolled, all is one loop over the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.sharding import constrain

PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
TINY = np.finfo(np.float32).tiny


def random_key(seed: Array, *names: Array) -> Array:
    """Returns the key of the stream that ``names`` name one after another, scalars all."""
    key = jax.random.key(seed, impl="threefry2x32")
    for name in names:
        key = jax.random.fold_in(key, name)
    return key


def gumbel(keys: Array, size: int) -> Array:
    """Returns float32 ``[R, size]``, for each of ``keys [R]`` what ``jax.random.gumbel(key,
    (size,))`` would."""
    words = jax.random.key_data(keys)
    # Said here, each device makes its own part of the vocabulary's noise; else each makes all.
    number = constrain(jnp.arange(size, dtype=jnp.uint32)[None], None, "vocab")
    bits = _threefry(words[:, :1], words[:, 1:], number)
    # The upper 23 bits are the fraction of a number from 1 to 2.
    from_1 = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    uniform = jnp.maximum(TINY, (from_1 - 1.0) * (1.0 - TINY) + TINY)
    return -jnp.log(-jnp.log(uniform))


def _threefry(first: Array, second: Array, number: Array) -> Array:
    """32 random bits for each ``number`` from a key of two words, uint32 all."""
    keys = (first, second, first ^ second ^ jnp.uint32(PARITY))
    x, y = jnp.zeros_like(number) + keys[0], number + keys[1]
    for turn in range(5):
        for rotation in ROTATIONS[turn % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x ^ y
