"""Rotary position embeddings with the context extensions of Hugging Face models.

RoPE sees logical positions: a token's place in the text, wherever it stands in the arrays. This
makes WeDLM's reordering possible: the causal mask depends on the physical order only, and the
model's sense of distance on RoPE only.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.config import ModelConfig, RopeConfig


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Returns the angular frequency of every rotated pair, ``[head_dim / 2]`` float32 radians per
    position, and the attention factor on cos and sin (1 except for YaRN).

    Source: RoFormer eq. 15; YaRN (arXiv 2309.00071) eqs. 19-23; Llama 3.1's scaling.
    """
    rope, dim, attention_factor = config.rope, config.head_dim, 1.0
    frequencies = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.get("factor")
    elif rope.rope_type == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.rope_type == "yarn":
        frequencies = _yarn(frequencies, rope, dim)
        attention_factor = _yarn_attention_factor(rope)
    return frequencies.astype(np.float32), attention_factor


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Stretches long wavelengths by ``factor`` and keeps short ones, with a ramp in between."""
    factor = rope.get("factor")
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    # How often each pair turns over the trained length; few turns mean a long wavelength.
    turns = rope.get("original_max_position_embeddings") * base / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * base / factor + smooth * base


def _yarn(base: np.ndarray, rope: RopeConfig, dim: int) -> np.ndarray:
    factor = rope.get("factor")
    length = rope.get("original_max_position_embeddings")

    def dimension_of(turns: float) -> float:
        """Returns the (fractional) index of the pair with these turns over the trained length."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    # Pairs that turn often tell neighbours apart and are kept; those that turn less than once over
    # the trained length would reach angles that were never trained, and are stretched.
    low = dimension_of(rope.get("beta_fast") or 32)
    high = dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    # NTK by parts: from unchanged (ramp 0) to stretched by the whole factor (ramp 1).
    return base / factor * ramp + base * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    factor = rope.get("factor")

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all:
        return scale(mscale) / scale(mscale_all)
    return scale(1.0)


def rope_tables(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """Returns float32 cosines and sines of ``positions [...]``, ``[..., head_dim / 2]`` each."""
    frequencies, factor = inverse_frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def held(tables: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the tables in a form that XLA computes only once.

    On a CPU, XLA fuses cosine and sine into the loop over every head of every layer, where they
    take a third of a forward's time. It does not fuse a concatenation, and the barrier keeps it
    from simplifying concatenation and split away.
    """
    joined = jax.lax.optimization_barrier(jnp.concatenate(tables, -1))
    cos, sin = jnp.split(joined, 2, -1)
    return cos, sin


def apply_rope(x: Array, tables: tuple[Array, Array]) -> Array:
    """Applies RoPE to each head of ``x [..., H, head_dim]`` in float32 and returns the dtype of
    ``x``; ``tables`` are from `rope_tables`."""
    # Pair i is features i and i + head_dim / 2 (half-split, as in Hugging Face), rotated by one
    # angle. The product of a query and a key then depends on their distance alone.
    cos, sin = (table[..., None, :] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, -1).astype(x.dtype)
