"""Logs a run: in a progress line for people, files for programs, and boards in a browser.

`metrics.jsonl` has a record for every logged step, `evaluation.jsonl` for every evaluation. After a
restart they are cut back to the step from which the run continues, so that they read as if it had
never stopped. Boards are TensorBoard and Weights & Biases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from train.recipe.config import MetricsSection, TrainConfig
from train.watch.records import Record, as_json, cut_back, logged
from wedlm_jax.errors import InputError
from wedlm_jax.host.progress import ProgressBar, clock

WANDB_ID = "wandb.id"
"""A file in the run's folder with the id of its W&B run, so that a restart continues it."""


def check_boards(section: MetricsSection) -> None:
    """Imports the packages that the recipe's boards need; called before anything is loaded.

    Raises:
      InputError: a package is missing; the message names the field and how to install it.
    """
    if section.tensorboard:
        _needed("tensorboardX", "metrics.tensorboard", '"wedlm-jax[tensorboard]"')
    if section.wandb:
        _needed("wandb", "metrics.wandb", "wandb")


def _needed(module: str, field: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f"{field} needs {module}: pip install {package}") from None


def open_boards(config: TrainConfig, output: Path, done: int) -> list[TensorBoard | Wandb]:
    """Opens the boards that a recipe asks for, continuing after ``done`` completed steps."""
    boards: list[TensorBoard | Wandb] = []
    if config.metrics.tensorboard:
        boards.append(TensorBoard(output / "tensorboard", done))
    if config.metrics.wandb:
        boards.append(Wandb(config.metrics.wandb, output, dataclasses.asdict(config)))
    return boards


class TensorBoard:
    """Writes scalars for TensorBoard."""

    def __init__(self, folder: Path, done: int):
        from tensorboardX import SummaryWriter

        # Purges what an earlier attempt wrote after the step from which the run resumes.
        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def write(self, step: int, record: Record) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Writes to a Weights & Biases run, named like the run's folder; its id is generated once."""

    def __init__(self, project: str, folder: Path, settings: dict[str, Any]):
        import wandb

        self._run = wandb.init(
            project=project,
            id=run_id(folder),
            name=folder.resolve().name,
            resume="allow",
            dir=str(folder),
            config=settings,
        )

    def write(self, step: int, record: Record) -> None:
        self._run.log(record, step=step)

    def close(self) -> None:
        self._run.finish()


def run_id(folder: Path) -> str:
    """Returns the id stored in a run's folder; generates one if there is none."""
    path = folder / WANDB_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:16] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


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
"""What the progress line shows, in this order and with these names; the files have the rest."""


class NoLog:
    """The log of a process other than the first: it writes nothing. The methods are those of
    `MetricsLog`."""

    def write(self, step: int, record: Record) -> None: ...

    def step(self, step: int) -> None: ...

    def expect(self, step: int) -> None: ...

    def saying(self, text: Callable[[float], str]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def evaluated(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


class MetricsLog(NoLog):
    """Writes what a run measures: to a progress bar, to its files, and to boards.

    Args:
      folder: folder of the run.
      total_steps: steps of the whole run.
      done: completed steps; later records in the files are dropped.
      title: title of the bar.
    """

    def __init__(
        self,
        folder: Path,
        total_steps: int,
        done: int,
        title: str,
        boards: Sequence[TensorBoard | Wandb] = (),
    ):
        for name in (METRICS, EVALUATION):
            cut_back(folder / name, done)
        self._folder, self._file = folder, (folder / METRICS).open("a", encoding="utf-8")
        self._boards, self._total = boards, total_steps
        self._bar = ProgressBar(
            "steps", total=total_steps, done=done, title=title, console=Console(), every=0.0
        )
        self._bar.start()
        self._expecting = contextlib.ExitStack()
        self._started = time.monotonic()

    def write(self, step: int, record: Record) -> None:
        """Logs one record, which must have ``step_seconds`` and ``tokens_per_second``."""
        self._expecting.close()
        self._file.write(as_json(step, record))
        self._file.flush()
        for board in self._boards:
            board.write(step, record)
        shown = [f"{short} {record[name]:.4g}" for name, short in SHOWN.items() if name in record]
        if epochs := [x for name, x in record.items() if name.partition("/")[0] == "epoch"]:
            few, many = f"{min(epochs):.2f}", f"{max(epochs):.2f}"
            shown.append(f"epoch {few}" if few == many else f"epochs {few} to {many}")
        shown.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        shown.append(f"{clock(time.monotonic() - self._started)} elapsed")
        left = (self._total - step) * record["step_seconds"]
        self._bar.update(step, text=", ".join(shown), seconds_left=left)

    def step(self, step: int) -> None:
        """Moves the bar to a completed step."""
        self._bar.move(step)

    def expect(self, step: int) -> None:
        """Shows, until the first record comes, that it comes after ``step``."""

        def text(seconds: float) -> str:
            return f"losses come after step {step}, {seconds:.0f} s so far"

        self._expecting.enter_context(self._bar.saying(text))

    def saying(self, text: Callable[[float], str]) -> AbstractContextManager[None]:
        """Shows what the block is doing, given the seconds so far (`ProgressBar.saying`)."""
        self._expecting.close()
        return self._bar.saying(text)

    def evaluated(self, step: int, record: Record) -> None:
        """Logs the result of an evaluation; boards show it under ``evaluation/``."""
        with (self._folder / EVALUATION).open("a", encoding="utf-8") as file:
            file.write(as_json(step, record))
        for board in self._boards:
            board.write(step, {f"evaluation/{name}": value for name, value in record.items()})

    def close(self) -> None:
        self._expecting.close()
        self._bar.stop()
        self._file.close()
        for board in self._boards:
            board.close()


def evaluated_steps(folder: Path) -> set[int]:
    """Returns the steps of a run that have an evaluation in its log."""
    return {record["step"] for _, record in logged(folder / EVALUATION)}
