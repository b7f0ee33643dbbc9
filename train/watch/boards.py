"""Boards that show records in a browser: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib
import uuid
from pathlib import Path
from typing import Any, Protocol

from train.recipe.config import MetricsSection, TrainConfig
from train.watch.records import Record
from wedlm_jax.errors import InputError

WANDB_ID = "wandb.id"
"""In the run's folder: the id of its W&B run, so that a restart goes on with it."""


class Sink(Protocol):
    """Takes records besides the JSONL file."""

    def write(self, step: int, record: Record) -> None: ...

    def close(self) -> None: ...


def check_boards(section: MetricsSection) -> None:
    """Imports what the recipe's boards need; done before anything is loaded.

    Raises:
      InputError: the field, and how to install what is missing.
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


def open_boards(config: TrainConfig, output: Path, done: int) -> list[Sink]:
    """Opens the boards that a recipe asks for, going on behind ``done`` completed steps."""
    boards: list[Sink] = []
    if config.metrics.tensorboard:
        boards.append(TensorBoard(output / "tensorboard", done))
    if config.metrics.wandb:
        boards.append(Wandb(config.metrics.wandb, output, dataclasses.asdict(config)))
    return boards


class TensorBoard:
    """Writes scalars for TensorBoard."""

    def __init__(self, folder: Path, done: int):
        from tensorboardX import SummaryWriter

        # What an earlier attempt wrote behind the step that the run goes on from is purged.
        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def write(self, step: int, record: Record) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Writes to a run of Weights & Biases, named like the run's folder; its id is drawn once."""

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
    """Returns the id kept in a run's folder; drawn where there is none."""
    path = folder / WANDB_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:16] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
