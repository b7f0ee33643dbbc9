"""The log of a run: a line a person reads, and files that a program reads.

`metrics.jsonl` has a record at every logged step, `evaluation.jsonl` at every evaluation. After a
restart they are cut back to the step that the run goes on from, so that they read as if the run had
never stopped.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from train.watch.boards import Sink
from train.watch.records import Record, as_json, cut_back
from wedlm_jax.host.progress import ProgressBar, clock

METRICS, EVALUATION = "metrics.jsonl", "evaluation.jsonl"
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
    """Writes what a run measures: to a progress bar, to its files, and to boards.

    Args:
      folder: of the run.
      total_steps: of the run.
      done: completed steps; later records in the files are dropped.
      title: of the bar.
      sinks: where records go, too.
    """

    def __init__(
        self, folder: Path, total_steps: int, done: int, title: str, sinks: list[Sink] | None = None
    ):
        for name in (METRICS, EVALUATION):
            cut_back(folder / name, done)
        self._folder, self._file = folder, (folder / METRICS).open("a", encoding="utf-8")
        self._sinks = sinks or []
        self._total = total_steps
        self._bar = ProgressBar(
            "steps", total=total_steps, done=done, title=title, console=Console(), every=0.0
        )
        self._bar.start()
        self._expecting = contextlib.ExitStack()
        self._started = time.monotonic()

    def write(self, step: int, record: Record) -> None:
        """Logs one record; it has ``step_seconds`` and ``tokens_per_second``."""
        self._expecting.close()
        self._file.write(as_json(step, record))
        self._file.flush()
        for sink in self._sinks:
            sink.write(step, record)
        shown = [f"{short} {record[name]:.4g}" for name, short in SHOWN.items() if name in record]
        if epochs := [x for name, x in record.items() if name.partition("/")[0] == "epoch"]:
            few, many = f"{min(epochs):.2f}", f"{max(epochs):.2f}"
            shown.append(f"epoch {few}" if few == many else f"epochs {few} to {many}")
        shown.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        shown.append(f"{clock(time.monotonic() - self._started)} elapsed")
        left = (self._total - step) * record["step_seconds"]
        self._bar.update(step, text=", ".join(shown), seconds_left=left)

    def step(self, step: int) -> None:
        """Moves the bar to a step that is done."""
        self._bar.move(step)

    def expect(self, step: int) -> None:
        """Says how far the steps are until the first record, which comes after ``step``."""

        def text(seconds: float) -> str:
            return f"losses come after step {step}, {seconds:.0f} s so far"

        self._expecting.enter_context(self._bar.saying(text))

    def saying(self, text: Callable[[float], str]) -> AbstractContextManager[None]:
        """Says what goes on in the block after so many seconds (`ProgressBar.saying`)."""
        self._expecting.close()
        return self._bar.saying(text)

    def evaluated(self, step: int, record: Record) -> None:
        """Logs what an evaluation found; on boards under ``evaluation/``."""
        with (self._folder / EVALUATION).open("a", encoding="utf-8") as file:
            file.write(as_json(step, record))
        for sink in self._sinks:
            sink.write(step, {f"evaluation/{name}": value for name, value in record.items()})

    def close(self) -> None:
        self._expecting.close()
        self._bar.stop()
        self._file.close()
        for sink in self._sinks:
            sink.close()


def evaluated_steps(folder: Path) -> set[int]:
    """Returns the steps of a run that have an evaluation in its log; what a crash left of a line
    does not count."""
    path, steps = folder / EVALUATION, set[int]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            steps.add(int(json.loads(line)["step"]))
    return steps
