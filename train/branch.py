"""A new run that begins with a state of another: `branch_from`.

It takes all that the state has: step number, parameters, optimizer and guard; and since a batch
depends on the recipe and the step alone, the place in the data, too. The other run's folder is only
read, and only at the beginning: what the new run needs of it is copied before its first step.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from train.checkpoint import check_readable
from train.program import TrainProgram
from train.recipe.config import TrainConfig
from train.run_files import CONFIG
from train.watch.pending import INTERVAL
from wedlm_jax.checkpoint import RUN_STATES
from wedlm_jax.checkpoint.orbax_io import OtherState, whole_steps
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import write_json
from wedlm_jax.host.processes import is_first
from wedlm_jax.host.storage import absolute, as_path

ORIGIN = "origin.json"
"""In a run's folder: the run and the step that it was branched from, and where that came from."""
DECISIVE = {
    "optimizer.name": "adamw",
    "optimizer.first_moment_dtype": "float32",
    "optimizer.average": 0.0,
}
"""Fields that decide which arrays an optimizer's state has, with their defaults."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Names a state of another run.

    Attributes:
      run: that run's folder.
      step: of the state.
    """

    run: Path
    step: int

    @property
    def state(self) -> Path:
        return self.run / RUN_STATES / str(self.step)

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


def origin_of(config: TrainConfig) -> Origin | None:
    """Finds the state that a recipe branches from; None where it does not.

    Raises:
      InputError: there is no such state, which names those that there are, or it is the run's own.
    """
    text = config.branch_from
    if text is None:
        return None
    run, step = _parts(text)
    if absolute(run) == absolute(as_path(config.output)):
        raise InputError(f"branch_from: {run} is the run's own folder; give output another")
    states = whole_steps(run / RUN_STATES)
    listed = ", ".join(map(str, states))
    if not states:
        raise InputError(f"branch_from: {run} has no whole state of a training run")
    if step is None:
        raise InputError(
            f"branch_from: {text} names no step, as {run}@{states[-1]} does; its states are "
            f"{listed}"
        )
    if step not in states:
        raise InputError(f"branch_from: {run} has no whole state {step}; its states are {listed}")
    if step >= config.steps:
        raise InputError(
            f"branch_from: {text} has {step} steps done, and steps is {config.steps}; nothing "
            "would be left to train"
        )
    return Origin(run, step)


def _parts(text: str) -> tuple[Path, int | None]:
    """Splits ``RUN@STEP``, or the path of a state, into the run's folder and the step."""
    name, _, step = text.rpartition("@")
    if name and step.isdigit():
        return as_path(name), int(step)
    path = as_path(text)
    if path.name.isdigit() and path.parent.name == RUN_STATES:
        return path.parent.parent, int(path.name)
    return path, None


def check_origin(origin: Origin, program: TrainProgram) -> None:
    """Refuses a state of another model or optimizer than the recipe's, by headers.

    Raises:
      InputError: naming the field of the recipe, or the array, that is other.
    """
    _check_optimizer(origin, program.config)
    try:
        check_readable(origin.state, program.state)
    except OtherState as other:
        raise InputError(f"branch_from: {other} than this recipe's") from None


def _check_optimizer(origin: Origin, config: TrainConfig) -> None:
    """Compares fields of the two recipes, where the other run has one: it tells more than shapes
    do."""
    try:
        text = (origin.run / CONFIG).read_text(encoding="utf-8")
        saved = OmegaConf.create(text)
    except Exception:
        # A YAML parser, and a bucket's client, have many error types of their own.
        return
    ours: Any = OmegaConf.create(dataclasses.asdict(config))
    for field, default in DECISIVE.items():
        was, now = (OmegaConf.select(tree, field, default=default) for tree in (saved, ours))
        if field == "optimizer.average":
            was, now = (value if bool(was) != bool(now) else 0 for value in (was, now))
        if was != now:
            raise InputError(
                f"branch_from: {field} was {was} in {origin.run} and is {now} in this recipe: the "
                "optimizer's state would have other arrays; model.init_from takes parameters alone"
            )


def write_origin(origin: Origin, output: Path, logs: Path) -> None:
    """Writes down where a run comes from, and the means that its first line of metrics goes on
    with.

    Args:
      output: the new run's folder.
      logs: where it writes its logs.
    """
    if not is_first():
        return
    line: dict[str, Any] = {"run": str(absolute(origin.run)), "step": origin.step}
    earlier = origin.run / ORIGIN
    if earlier.exists():
        line["origin"] = json.loads(earlier.read_text(encoding="utf-8"))
    write_json(output / ORIGIN, line)
    interval = origin.run / INTERVAL
    if interval.exists():
        (logs / INTERVAL).write_bytes(interval.read_bytes())
