"""Steps that are not taken: gradients that are not finite, or far above their usual size.

A skipped step leaves parameters and optimizer as they were; the data and the learning rate move
on, which are of the step's number. The decision
is made inside the jitted step, so nothing waits for the host, which reads it with the metrics
(`train.watch.pending`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

NORM_DECAY = 0.98
"""Of the running mean of gradient norms: it remembers about 50 steps."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """Says when a step is skipped.

    Attributes:
      spike_factor: skip where the gradient norm exceeds this many times its running mean; 0
        skips only what is not finite.
      settle: steps before spikes are looked for, in which norms change much by themselves.
    """

    spike_factor: float = 0.0
    settle: int = 50


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """Holds what the guard remembers.

    Attributes:
      mean_norm: float32 scalar, running mean of the gradient norms of the steps taken.
      skipped: int32 scalar, steps skipped in a row until now.
    """

    mean_norm: Array
    skipped: Array

    @classmethod
    def first(cls) -> GuardState:
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


def judge(guard: Guard, state: GuardState, step: Array, norm: Array) -> tuple[Array, GuardState]:
    """Decides whether step number ``step`` (0 is the first), with this gradient norm, is taken:
    bool scalar, and what is remembered after it."""
    taken, known = jnp.isfinite(norm), state.mean_norm > 0
    if guard.spike_factor:
        usual = norm <= guard.spike_factor * state.mean_norm
        taken &= (step < guard.settle) | ~known | usual
    mean = jnp.where(known, NORM_DECAY * state.mean_norm + (1 - NORM_DECAY) * norm, norm)
    return taken, GuardState(
        mean_norm=jnp.where(taken, mean, state.mean_norm),
        skipped=jnp.where(taken, 0, state.skipped + 1),
    )
