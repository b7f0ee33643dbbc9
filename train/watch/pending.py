"""Metrics on their way from the devices to the host, and the steps that were skipped among them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from train.recipe.skipped_batches import NONE_SKIPPED, SkippedBatches
from train.watch.records import Interval, Record, as_json, cut_back, flatten
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import is_first, say

SKIPPED = "skipped.jsonl"
INTERVAL = "interval.jsonl"
"""What had been averaged at each checkpoint within a logging interval, so that a run that goes on
from there logs the same means."""


class TooManySkipped(InputError):
    """Says that as many steps in a row were skipped as the recipe allows."""


class PendingMetrics:
    """Collects metrics of the steps since the last record.

    Each skipped step is a line in ``skipped.jsonl``, with the number of its batch and where its
    rows stand, those of each process apart.

    Args:
      output: the run's folder.
      max_skipped: steps skipped in a row that end the run.
      read_from: gives, for a step counted from 0, the files that each process reads of its batch
        and the numbers of the rows in each.
      ar_weight, sources: as in `Interval`.
      skipped: the batches that no step reads.
      done: completed steps; means of the interval that was open then go on.
    """

    def __init__(
        self,
        output: Path,
        max_skipped: int,
        read_from: Callable[[int], list[dict[str, list[int]]]],
        *,
        ar_weight: float = 1.0,
        sources: Sequence[str] = (),
        skipped: SkippedBatches = NONE_SKIPPED,
        done: int = 0,
    ):
        self._skipped = skipped
        self._output, self._max, self._read_from = output, max_skipped, read_from
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []
        self._interval = Interval(ar_weight, sources)
        if is_first():
            for line in cut_back(output / INTERVAL, done):
                if line["step"] == done:
                    self._interval.restore(line)

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a step that has been sent to the devices, and waits for the step
        before it: the host is never more than a step ahead, and its clock tells the truth."""
        if self._waiting:
            jax.block_until_ready(self._waiting[-1][1])
        self._waiting.append((step, metrics))

    def record(self) -> Record:
        """Means over the steps since the last record; waits for the newest.

        Raises:
          TooManySkipped: more steps in a row were skipped than allowed.
        """
        self.gather()
        return self._interval.record()

    def keep(self, step: int) -> None:
        """Writes down what a run that goes on from ``step`` needs of these; raises as `record`."""
        self.gather()
        if is_first() and not self._interval.empty:
            line = json.dumps({"step": step, **self._interval.state()}) + "\n"
            with (self._output / INTERVAL).open("a", encoding="utf-8") as file:
                file.write(line)

    def gather(self) -> None:
        """Brings all metrics to the host; raises as `record`."""
        waiting, self._waiting = jax.device_get(self._waiting), []
        refused = None
        for step, metrics in waiting:
            self._interval.add(metrics)
            if metrics["skipped"]:
                self._note(step, metrics)
            if metrics["skipped"] >= self._max:
                refused = refused or (step, int(metrics["skipped"]))
        if refused:
            raise TooManySkipped(
                f"step {refused[0]}: {refused[1]} steps in a row were skipped, which is as "
                f"many as optimizer.max_skipped allows; {SKIPPED} in the run's folder names their "
                "batches and rows; the same command goes on behind them"
            )

    def _note(self, step: int, metrics: Mapping[str, Any]) -> None:
        why = flatten({name: metrics[name] for name in ("loss", "gradient_norm")})
        say(f"step {step} skipped: " + ", ".join(f"{k} {v:.4g}" for k, v in why.items()))
        if is_first():
            with (self._output / SKIPPED).open("a", encoding="utf-8") as file:
                rows, batch = self._read_from(step - 1), self._skipped.batch(step)
                file.write(as_json(step, {"batch": batch, **why}, rows=rows))
