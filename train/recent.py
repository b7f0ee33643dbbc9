"""The steps since the last record of metrics: which were skipped, and on what rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from train.metrics import Record, as_json, flatten
from train.step import Metrics
from wedlm_jax.errors import InputError
from wedlm_jax.processes import is_first, say

SKIPPED = "skipped.jsonl"


class Recent:
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
        self._waiting: list[tuple[int, Metrics]] = []

    def add(self, step: int, metrics: Metrics) -> None:
        self._waiting.append((step, metrics))

    def read(self) -> Record:
        """The newest step's metrics; waits for it.

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
