"""The log of a run: a line a person reads, and `metrics.jsonl`, which a program reads.

`metrics.jsonl` has a record at every logged step. After a restart it is cut back to the step
that the run goes on from, so that it reads as if the run had never stopped.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from train.watch.boards import Sink
from train.watch.records import Record, as_json, cut_back
from wedlm_jax.progress import ProgressBar, clock

SHOWN = {
    "loss": "loss",
    "mlm_loss": "mlm",
    "ar_loss": "ar",
    "masked_accuracy": "masked acc",
    "gradient_norm": "norm",
    "learning_rate": "lr",
    "mfu": "mfu",
}
"""On the line for a person, in this order and by these names; all else is in the files."""


class MetricsLog:
    """Writes what a run measures: to a progress bar, to ``metrics.jsonl``, and to boards.

    Args:
      folder: of the run.
      total_steps: of the run.
      done: completed steps; later records in the file are dropped.
      title: of the bar.
      sinks: where records go, too.
    """

    def __init__(
        self, folder: Path, total_steps: int, done: int, title: str, sinks: list[Sink] | None = None
    ):
        path = folder / "metrics.jsonl"
        cut_back(path, done)
        self._file = path.open("a", encoding="utf-8")
        self._sinks = sinks or []
        self._total = total_steps
        self._bar = ProgressBar(
            "steps", total=total_steps, done=done, title=title, console=Console(), every=0.0
        )
        self._bar.start()
        self._started = time.monotonic()

    def write(self, step: int, record: Record) -> None:
        """Logs one record; it has ``step_seconds`` and ``tokens_per_second``."""
        self._file.write(as_json(step, record))
        self._file.flush()
        for sink in self._sinks:
            sink.write(step, record)
        shown = [f"{short} {record[name]:.4g}" for name, short in SHOWN.items() if name in record]
        shown.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        shown.append(f"{clock(time.monotonic() - self._started)} elapsed")
        left = (self._total - step) * record["step_seconds"]
        self._bar.update(step, text=", ".join(shown), seconds_left=left)

    def close(self) -> None:
        self._bar.stop()
        self._file.close()
        for sink in self._sinks:
            sink.close()
