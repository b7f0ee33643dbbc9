"""Learning rate by step: warm-up, then a cosine, or a plateau with a decay at its end."""

from __future__ import annotations

import itertools

import optax

from train.recipe.config import TrainConfig
from train.recipe.phases import phases_of
from wedlm_jax.errors import InputError


def schedule_of(config: TrainConfig) -> optax.Schedule:
    """Returns the recipe's learning rate, in its phases times what they say.

    Raises:
      InputError: warm-up and decay leave no step between them.
    """
    o, steps = config.optimizer, config.steps
    if not 0 <= o.warmup_steps < steps:
        raise InputError(
            f"optimizer.warmup_steps must be 0 to {steps - 1}, below steps, not {o.warmup_steps}"
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
