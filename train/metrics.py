"""What a run says of itself: a line a person reads, a JSONL a program reads, and boards.

`metrics.jsonl` has a record at every logged step. After a restart it is cut back to the step
that the run goes on from, so that it reads as if the run had never stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console

from wedlm_jax.atomic import written_beside
from wedlm_jax.errors import InputError
from wedlm_jax.progress import ProgressBar

Record = dict[str, float]
BY_RATIO = "mlm_loss_by_ratio"
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


def flatten(metrics: Mapping[str, Any]) -> Record:
    """Metrics of a step as plain numbers. The MLM loss by mask ratio becomes a number a bin,
    ``mlm_loss_ratio_0.25_0.50``; bins without a mask are left out."""
    record: Record = {}
    for name, value in metrics.items():
        if name != BY_RATIO:
            record[name] = float(value)
            continue
        losses = np.asarray(value)
        for i, loss in enumerate(losses):
            if loss > 0:
                low, high = i / len(losses), (i + 1) / len(losses)
                record[f"mlm_loss_ratio_{low:.2f}_{high:.2f}"] = float(loss)
    return record


def as_json(step: int, record: Mapping[str, float], **more: Any) -> str:
    """A line of a JSONL file. JSON has no word for what is not finite: it becomes null.

    ``more`` stands behind the numbers as it is.
    """
    known = {name: x if math.isfinite(x) else None for name, x in record.items()}
    return json.dumps({"step": step, **known, **more}, ensure_ascii=False) + "\n"


class Sink(Protocol):
    """Where records go besides the JSONL file."""

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


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

    def write(self, step: int, record: Record) -> None:
        """Logs one record; it has ``step_seconds`` and ``tokens_per_second``."""
        self._file.write(as_json(step, record))
        self._file.flush()
        for sink in self._sinks:
            sink.write(step, record)
        shown = (f"{short} {record[name]:.4g}" for name, short in SHOWN.items() if name in record)
        self._bar.update(
            step,
            text=", ".join([*shown, f"{record['tokens_per_second']:,.0f} tokens/s"]),
            seconds_left=(self._total - step) * record["step_seconds"],
        )

    def close(self) -> None:
        self._bar.stop()
        self._file.close()
        for sink in self._sinks:
            sink.close()


def cut_back(path: Path, step: int) -> None:
    """Drops the records behind ``step``, and what a crash left of a line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    with written_beside(path) as file:
        file.write("".join(kept).encode("utf-8"))


class TensorBoard:
    """Scalars for TensorBoard.

    Raises:
      InputError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, done: int):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise InputError(
                'metrics.tensorboard needs tensorboardX: pip install "wedlm-jax[tensorboard]"'
            ) from None
        # What an earlier attempt wrote behind the step that the run goes on from is purged.
        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def write(self, step: int, record: Record) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, resumed by the name of the run's folder.

    Raises:
      InputError: wandb is not installed.
    """

    def __init__(self, project: str, folder: Path, settings: dict[str, Any]):
        try:
            import wandb
        except ImportError:
            raise InputError("metrics.wandb needs wandb: pip install wandb") from None
        name = folder.resolve().name
        self._run = wandb.init(
            project=project, id=name, name=name, resume="allow", dir=str(folder), config=settings
        )

    def write(self, step: int, record: Record) -> None:
        self._run.log(record, step=step)

    def close(self) -> None:
        self._run.finish()


class StepClock:
    """Wall-clock of the steps between two records.

    Args:
      now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self.restart()

    def restart(self) -> None:
        """Forgets what was before, such as compiling."""
        self._started, self._steps, self._waited = self._now(), 0, 0.0

    def count(self, waited: float) -> None:
        """Notes a step that waited so many seconds for its input."""
        self._steps += 1
        self._waited += waited

    def read(self, tokens_per_step: int) -> Record:
        """``step_seconds``, ``tokens_per_second`` and ``input_wait`` (share of the time) since
        the last reading."""
        seconds = max(self._now() - self._started, 1e-9)
        steps, waited = self._steps, self._waited
        self.restart()
        return {
            "step_seconds": round(seconds / max(steps, 1), 6),
            "tokens_per_second": round(steps * tokens_per_step / seconds, 1),
            "input_wait": round(waited / seconds, 4),
        }
