"""The preallocated KV cache: written at each row's own length, never moved."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.config import ModelConfig
from wedlm_jax.sharding import CACHE_AXES, constrain, on_own_shard


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
    keys, values = (constrain(jnp.zeros(shape, dtype), *CACHE_AXES) for _ in range(2))
    return KVCache(keys, values)


def write(cache: KVCache, kv: tuple[Array, Array], starts: Array) -> KVCache:
    """Writes new rows behind what each sequence has.

    Args:
      kv: keys and values ``[num_hidden_layers, B, K, P, head_dim]``.
      starts: int32 ``[B]``, where each sequence's P rows go. ``starts + P`` must not exceed
        the cache size: XLA would move the write back over committed rows, so the engine
        allocates room for a whole window behind the last token.
    """

    def put(old: Array, new: Array, starts: Array) -> Array:
        def row(old: Array, new: Array, at: Array) -> Array:
            return jax.lax.dynamic_update_slice(old, new, (0, at, 0))

        return jax.vmap(jax.vmap(row), in_axes=(0, 0, None))(old, new.astype(old.dtype), starts)

    # Each device writes its own rows and heads: nothing of the cache ever moves.
    put = on_own_shard(put, [CACHE_AXES, CACHE_AXES, ("batch",)])
    return KVCache(put(cache.keys, kv[0], starts), put(cache.values, kv[1], starts))
