"""Optimizers by name: AdamW, or Muon on the layers' matrices with AdamW for the rest.

Both come from optax; here stands what they need to know about our parameters, whose
layers are stacked: which of them are matrices, and which axes of those a product reduces.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

MUON_RMS = 0.2
"""Root mean square of an entry of Muon's update before the learning rate, as AdamW's has in
practice, so that one learning rate suits both (Moonlight, arXiv 2502.16982, section 2.2)."""


def make_optimizer(
    schedule: optax.Schedule,
    *,
    name: str = "adamw",
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    clip_norm: float,
) -> optax.GradientTransformation:
    """Makes the optimizer called ``name``, after clipping by the global norm.

    Args:
      schedule: learning rate by step.
      name: "adamw", or "muon": orthogonalised momentum for every matrix of a layer (momentum
        0.95, Nesterov), AdamW for embeddings, head, norms and biases.
      b1: AdamW's first moment decay.
      b2: AdamW's second moment decay.
      eps: of AdamW and of Muon.
      weight_decay: on matrices only; with "muon", on those that Muon updates.
      clip_norm: the global gradient norm is clipped to this.
    """
    if name == "muon":
        update = optax.contrib.muon(
            schedule,
            weight_decay=weight_decay,
            consistent_rms=MUON_RMS,
            muon_weight_dimension_numbers=layer_matrices,
            adam_b1=b1,
            adam_b2=b2,
            eps=eps,
        )
    elif name == "adamw":
        update = optax.adamw(
            schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed
        )
    else:
        raise ValueError(f"unknown optimizer {name!r}")
    return optax.chain(optax.clip_by_global_norm(clip_norm), update)


def learning_rate(schedule: optax.Schedule, state: Any) -> Array:
    """Returns the rate that the next update of an optimizer in this state uses: float32 scalar."""
    counts = optax.tree_utils.tree_get_all_with_path(state, "count")
    # Every part of the optimizer counts the same updates.
    return jnp.asarray(schedule(counts[0][1]), jnp.float32)


def decayed(parameters: Any) -> Any:
    """Marks what weight decay applies to: matrices. Norm scales and biases are spared, although
    stacking the layers gives them two axes."""

    def is_matrix(path: tuple[Any, ...], _: Array) -> bool:
        return not {"scale", "bias"} & set(_names(path))

    return jax.tree_util.tree_map_with_path(is_matrix, parameters)


def layer_matrices(parameters: Any) -> Any:
    """Returns, for each matrix of a layer, ``[layers, in, out]``, the axes Muon orthogonalises
    over; None for all else."""

    def dimensions(path: tuple[Any, ...], _: Array) -> optax.contrib.MuonDimensionNumbers | None:
        stacked = {"layers", "kernel"} <= set(_names(path))
        return optax.contrib.MuonDimensionNumbers(1, 2) if stacked else None

    return jax.tree_util.tree_map_with_path(dimensions, parameters)


def _names(path: tuple[Any, ...]) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")
