"""Norms of parameters and of their updates, by group: what grows, and how fast."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

GROUPS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "q_proj": "attention",
    "k_proj": "attention",
    "v_proj": "attention",
    "o_proj": "attention",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
    "scale": "norms",
}
"""Group of a parameter by a part of its path."""


def group_norms(tree: Any, name: str) -> dict[str, Array]:
    """Returns the Euclidean norm of each group's leaves, all layers together: float32 scalars
    called ``<name>_norm_<group>``."""
    squares: dict[str, list[Array]] = collections.defaultdict(list)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        group = next((GROUPS[part] for part in parts if part in GROUPS), "others")
        squares[group].append(jnp.square(leaf.astype(jnp.float32)).sum())
    return {f"{name}_norm_{group}": jnp.sqrt(sum(parts)) for group, parts in squares.items()}
