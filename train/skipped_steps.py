"""Steps that are not taken: gradients that are not finite, or far above their usual size.

A skipped step leaves parameters and optimizer as they were; the data moves on. The decision
is made inside the jitted step, so nothing waits for the host. The host reads it with the metrics,
names the batch and rows of each skipped step, and stops a run that skips too many in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array

from train.metrics import Record, as_json, flatten
from wedlm_jax.errors import InputError
from wedlm_jax.processes import is_first, say

SKIPPED = "skipped.jsonl"
NORM_DECAY = 0.98
"""Of the running mean of gradient norms: it remembers about 50 steps."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """When a step is skipped.

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
    """What the guard remembers.

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


class PendingMetrics:
    """Metrics of the steps since the last record, still on the devices.

    Reading them finds the steps that were skipped: each is a line in ``skipped.jsonl``, with the
    number of its batch (that of the step, from 0) and where its rows stand, those of each
    process apart; and too many in a row end the run.

    Args:
      output: the run's folder.
      max_skipped: steps skipped in a row that end it.
      read_from: gives, for the number of a batch, the files that each process reads of it and
        the numbers of the rows in each.
    """

    def __init__(
        self, output: Path, max_skipped: int, read_from: Callable[[int], list[dict[str, list[int]]]]
    ):
        self._path, self._max, self._read_from = output / SKIPPED, max_skipped, read_from
        self._waiting: list[tuple[int, Mapping[str, Array]]] = []

    def add(self, step: int, metrics: Mapping[str, Array]) -> None:
        self._waiting.append((step, metrics))

    def read(self) -> Record:
        """Returns the newest step's metrics; waits for it.

        Raises:
          InputError: more steps in a row were skipped than allowed.
        """
        record: Record = {}
        for step, metrics in self._waiting:
            record = flatten(jax.device_get(metrics))
            if record["skipped"]:
                self._note(step, record)
        self._waiting.clear()
        return record

    def _note(self, step: int, record: Record) -> None:
        why = {name: record[name] for name in ("loss", "gradient_norm")}
        say(f"step {step} skipped: " + ", ".join(f"{k} {v:.4g}" for k, v in why.items()))
        if is_first():
            with self._path.open("a", encoding="utf-8") as file:
                rows = self._read_from(step - 1)
                file.write(as_json(step, {"batch": step - 1, **why}, rows=rows))
        if record["skipped"] >= self._max:
            raise InputError(
                f"step {step}: {record['skipped']:.0f} steps in a row were skipped, which is as "
                f"many as optimizer.max_skipped allows; {self._path} names their batches and rows"
            )
