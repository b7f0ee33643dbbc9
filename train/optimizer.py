"""The learning rate by step, and optimizers by name: AdamW, or Muon on the layers' matrices with
AdamW for the rest.

Both come from optax. This module tells them about our parameters, whose layers are stacked: which
are matrices, and which of their axes a product reduces.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from train.recipe.config import OptimizerSection, TrainConfig
from train.recipe.phases import phases_of
from wedlm_jax.errors import InputError


def schedule_of(config: TrainConfig) -> optax.Schedule:
    """Returns the recipe's learning rate by step, scaled by the factors of its phases.

    Raises:
      InputError: warm-up and decay do not fit into the steps.
    """
    o, steps = config.optimizer, config.steps
    if not 0 <= o.warmup_steps < steps:
        raise InputError(
            f"optimizer.warmup_steps: expected fewer than steps ({steps}), not {o.warmup_steps}"
        )
    if o.schedule == "cosine":
        whole = optax.warmup_cosine_decay_schedule(
            0.0, o.learning_rate, o.warmup_steps, steps, o.final_learning_rate
        )
    else:
        whole = _plateau(config)
    factors = {
        phase.first: phase.config.optimizer.learning_rate / before.config.optimizer.learning_rate
        for before, phase in itertools.pairwise(phases_of(config))
        if phase.config.optimizer.learning_rate != before.config.optimizer.learning_rate
    }
    if not factors:
        return whole
    factor = optax.piecewise_constant_schedule(1.0, factors)
    return lambda count: whole(count) * factor(count)


def _plateau(config: TrainConfig) -> optax.Schedule:
    """Returns warm-up, a constant rate, and a linear decay over the last ``decay_steps``."""
    o, steps = config.optimizer, config.steps
    if o.warmup_steps + o.decay_steps > steps:
        raise InputError(
            f"optimizer.decay_steps must be at most {steps - o.warmup_steps}, "
            f"what warmup_steps leaves of steps, not {o.decay_steps}"
        )
    parts = [
        optax.linear_schedule(0.0, o.learning_rate, o.warmup_steps),
        optax.constant_schedule(o.learning_rate),
        optax.linear_schedule(o.learning_rate, o.final_learning_rate, o.decay_steps),
    ]
    return optax.join_schedules(parts, [o.warmup_steps, steps - o.decay_steps])


MUON_RMS = 0.2
"""Root mean square of the entries of Muon's update before the learning rate. AdamW's has about the
same in practice, so one learning rate suits both (Moonlight, arXiv 2502.16982, section 2.2)."""


def make_optimizer(
    schedule: optax.Schedule, section: OptimizerSection
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a recipe, preceded by clipping to a global norm.

    Muon orthogonalises the momentum of every matrix of a layer (momentum 0.95, Nesterov), and
    leaves embeddings, head, norms and biases to AdamW. AdamW's weight decay applies to matrices,
    Muon's only to those that it updates. First moments are computed in float32, however they are
    stored.

    Its ``update`` takes the number of the step, from 0, as ``step``, which determines the learning
    rate. The bias correction of the moments counts updates, which are fewer if steps were skipped.

    Args:
      schedule: learning rate by step.
      section: the other settings.
    """
    decay, eps = section.weight_decay, section.eps
    dtype = jnp.dtype(section.first_moment_dtype)
    if section.name == "muon":
        update = optax.contrib.muon(
            1.0,
            weight_decay=decay,
            consistent_rms=MUON_RMS,
            muon_weight_dimension_numbers=layer_matrices,
            adam_b1=section.b1,
            adam_b2=section.b2,
            eps=eps,
            mu_dtype=dtype,
        )
    else:
        update = optax.adamw(
            1.0, section.b1, section.b2, eps, weight_decay=decay, mask=decayed, mu_dtype=dtype
        )
    chain = [optax.clip_by_global_norm(section.clip_norm), update, scale_by_step(schedule)]
    average = [average_parameters(section.average)] if section.average else []
    return optax.chain(*chain, *average)


def scale_by_step(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by the learning rate of their step; keeps no count of its own."""

    def update(
        updates: Any, state: optax.EmptyState, parameters: Any = None, *, step: Array, **_: Any
    ) -> tuple[Any, optax.EmptyState]:
        rate = schedule(step)
        return jax.tree.map(lambda x: jnp.asarray(rate, x.dtype) * x, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


class ParameterAverage(NamedTuple):
    """State of `average_parameters`.

    Attributes:
      updates: int32 scalar, the number of updates so far.
      average: the averages, in the structure of the parameters.
    """

    updates: Array
    average: Any


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Keeps a moving average of the parameters after each update; must be the last of a chain, and
    leaves updates unchanged.

    Since early parameters mean little, the decay grows to its value: after t updates it is at most
    (1 + t) / (10 + t).
    """

    def init(parameters: Any) -> ParameterAverage:
        return ParameterAverage(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, parameters))

    def update(
        updates: Any, state: ParameterAverage, parameters: Any = None
    ) -> tuple[Any, ParameterAverage]:
        now = jnp.minimum(decay, (1 + state.updates) / (10 + state.updates))
        after = optax.apply_updates(parameters, updates)
        average = jax.tree.map(lambda old, new: now * old + (1 - now) * new, state.average, after)
        return updates, ParameterAverage(state.updates + 1, average)

    return optax.GradientTransformation(init, update)


def averaged_parameters(state: Any, parameters: Any) -> Any:
    """Returns the average of the parameters if the state has one, else the parameters."""

    def is_average(node: Any) -> bool:
        return isinstance(node, ParameterAverage)

    found = filter(is_average, jax.tree.leaves(state, is_leaf=is_average))
    return next((node.average for node in found), parameters)


def decayed(parameters: Any) -> Any:
    """Marks the parameters with weight decay, which are the matrices. Norm scales and biases have
    none, although stacking the layers gives them two axes."""

    def is_matrix(path: tuple[Any, ...], _: Array) -> bool:
        return not {"scale", "bias"} & set(_names(path))

    return jax.tree_util.tree_map_with_path(is_matrix, parameters)


def layer_matrices(parameters: Any) -> Any:
    """Returns the axes that Muon orthogonalises for each matrix of a layer, ``[layers, out, in]``;
    None for all other parameters."""

    def dimensions(path: tuple[Any, ...], _: Array) -> optax.contrib.MuonDimensionNumbers | None:
        stacked = {"layers", "weight"} <= set(_names(path))
        return optax.contrib.MuonDimensionNumbers(2, 1) if stacked else None

    return jax.tree_util.tree_map_with_path(dimensions, parameters)


def _names(path: tuple[Any, ...]) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")
