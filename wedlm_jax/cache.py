"""The preallocated KV cache: written at each row's own length, never moved."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values ``[num_hidden_layers, B, K, S, head_dim]``."""

    keys: Array
    values: Array

    @property
    def size(self) -> int:
        """S: the rows each sequence has."""
        return self.keys.shape[3]

    def layers(self) -> tuple[Array, Array]:
        return self.keys, self.values


def allocate(config: ModelConfig, batch: int, size: int, dtype: Any) -> KVCache:
    shape = (
        config.num_hidden_layers, batch, config.num_key_value_heads, size, config.head_dim,
    )  # fmt: skip
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KVCache, kv: tuple[Array, Array], starts: Array) -> KVCache:
    """Writes new rows behind what each sequence has.

    Args:
      kv: keys and values ``[num_hidden_layers, B, K, P, head_dim]``.
      starts: int32 ``[B]``, where each sequence's P rows go. ``starts + P`` must not exceed
        the cache size: XLA would move the write back over committed rows, so the engine
        allocates room for a whole window behind the last token.
    """

    @jax.vmap
    def per_layer(old: Array, new: Array) -> Array:
        return jax.vmap(lambda o, n, at: jax.lax.dynamic_update_slice(o, n, (0, at, 0)))(
            old, new.astype(old.dtype), starts
        )

    return KVCache(per_layer(cache.keys, kv[0]), per_layer(cache.values, kv[1]))
