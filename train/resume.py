"""Resumes a run from its own states, with a recipe that may have changed since, or branches from a
state of another run (`branch_from`).

Changes of the recipe are reported. A change is harmless if the completed steps would have had the
same result, apart from rounding: how often the run saves, on how many devices it runs, what it does
from a later step on. All other changes are refused without ``--allow-changed``, because the states
would come from one recipe and the later steps from another.

`RowOrder` determines which rows a step reads. States do not record the rows on which they were
trained, so the run records the order in `order.json`.

A run that branches takes everything in the other run's state: step number, parameters, optimizer
and guard; and, since a batch depends on the recipe and the step alone, the place in the data, too.
The other run's folder is only read, and only at the beginning: what the new run needs is copied
before its first step.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from omegaconf import OmegaConf

from train.checkpoint import OtherState, check_readable
from train.data.sources import manifest_of
from train.optimizer import schedule_of
from train.program import TrainProgram
from train.recipe.config import TrainConfig, field_values, save_config
from train.recipe.phases import phases_of
from train.recipe.skipped_batches import SkippedBatches
from train.run_files import CONFIG
from train.watch.records import INTERVAL
from wedlm_jax.checkpoint import RUN_STATES
from wedlm_jax.checkpoint.orbax import whole_steps
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import write_json
from wedlm_jax.host.processes import is_first, say, text_of_first
from wedlm_jax.host.storage import absolute, as_path

ORIGIN = "origin.json"
"""A file with the run and step from which a run was branched, and the origin of that run."""
DECISIVE = {
    "optimizer.name": "adamw",
    "optimizer.first_moment_dtype": "float32",
    "optimizer.average": 0.0,
}
"""Fields that determine which arrays an optimizer's state has, with their defaults."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """A state of another run, from which a run branches: the run's folder and the state's step."""

    run: Path
    step: int

    @property
    def state(self) -> Path:
        return self.run / RUN_STATES / str(self.step)

    def __str__(self) -> str:
        return f"{self.run}@{self.step}"


def origin_of(config: TrainConfig) -> Origin | None:
    """Returns the state that a recipe branches from; None if it does not branch.

    Raises:
      InputError: there is no such state, in which case the message lists the existing ones; or it
        is the run's own.
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
            f"branch_from: {text} names no step, unlike {run}@{states[-1]}; its states are {listed}"
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
    """Refuses a state of another model or optimizer than the recipe's, going by its headers.

    Raises:
      InputError: they differ; the message names the field of the recipe, or the array.
    """
    _check_optimizer(origin, program.config)
    try:
        check_readable(origin.state, program.state)
    except OtherState as other:
        raise InputError(f"branch_from: {other} than this recipe's") from None


def _saved_fields(run: Path) -> dict[str, Any]:
    """Reads the values of a run's recipe by name. Errors of YAML parsers and of buckets' clients
    have many types."""
    text = (run / CONFIG).read_text(encoding="utf-8")
    return field_values(OmegaConf.to_container(OmegaConf.create(text)))


def _check_optimizer(origin: Origin, config: TrainConfig) -> None:
    """Compares fields of the two recipes, if the other run has one: this gives a clearer message
    than comparing shapes."""
    try:
        saved = _saved_fields(origin.run)
    except Exception:
        # A recipe that was edited by hand can raise anything. Shapes are compared later, so without
        # it only the clearer message is lost.
        return
    ours = field_values(dataclasses.asdict(config))
    for field, default in DECISIVE.items():
        was, now = saved.get(field, default), ours[field]
        if field == "optimizer.average":
            was, now = (value if bool(was) != bool(now) else 0 for value in (was, now))
        if was != now:
            raise InputError(
                f"branch_from: {field} was {was} in {origin.run} and is {now} in this recipe: the "
                "optimizer's state would have other arrays; model.init_from takes parameters alone"
            )


def write_origin(origin: Origin, output: Path, logs: Path) -> None:
    """Records where a run comes from, and copies the running means with which its metrics continue,
    to the folders of the new run and of its logs."""
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


ORDER = "order.json"
CHANGES = "changes.jsonl"
"""A file with what had changed at each step from which a run continued with another recipe."""
ALLOW = "--allow-changed"

EACH_ITS_OWN = re.compile(r"(output|branch_from) was ")
"""Changes that every branched run has."""
HARMLESS = re.compile(
    r"output|branch_from|checkpoint_\w+|keep_\w+|export_dtype|log_every|prediction_blocks"
    r"|optimizer.max_skipped"
    r"|data.(workers|prefetch)|loss.(chunk|remat|attention|tile|unroll)|(mesh|metrics|evaluation)\..*"
)
"""Fields that affect only how a run is executed, saved and monitored. A field in none of these
lists is refused, so new ones are until someone has classified them."""
BY_CONTENT = re.compile(
    r"seed|rows|accumulation|row_length|block_size|phases"
    r"|data.(sources|skip|tokenizer)"
)
"""Fields for which `RowOrder` shows whether a change matters; a moved folder does not."""
BY_RATE = re.compile(
    r"steps|phases|optimizer.(schedule|learning_rate|final_learning_rate|warmup_steps|decay_steps)"
)
"""Fields of the learning rate, harmless if it is the same at every completed step."""

REMARKS = {
    "branch_from": "; the run continues from its own states and does not read it",
    **dict.fromkeys(
        ("model.init_from", "drafter.init_from"),
        "; the run continues from its states and does not read it",
    ),
}
"""Remarks on changed fields whose names do not explain the effect."""


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Everything that determines which rows a step reads.

    Attributes:
      seed: seed of the order, and of the masks.
      batch_rows: rows x accumulation.
      row_length, block_size: length and block size of the rows.
      sources: content and weight of each set of rows, in the recipe's order, wherever it is.
      phases: the same fields for each later phase, and the step from which they apply.
      skip: the batches that no step reads.
    """

    seed: int
    batch_rows: int
    row_length: int
    block_size: int
    sources: list[dict[str, Any]]
    phases: list[dict[str, Any]]
    skip: list[list[int]]

    def differences(self, before: RowOrder, done: int) -> list[str]:
        """Lists the differences, by the recipe's names, in what ``done`` steps have read."""
        names = {"batch_rows": "rows x accumulation"}
        changed = [
            f"{names.get(name, name)} was {getattr(before, name)}, is {getattr(self, name)}"
            for name in ("seed", "batch_rows", "row_length", "block_size")
            if getattr(before, name) != getattr(self, name)
        ]
        if [(s["content"], s["weight"]) for s in before.sources] != [
            (s["content"], s["weight"]) for s in self.sources
        ]:
            changed.append(f"the rows were of {_listed(before)}, are of {_listed(self)}")
        were, are = (
            [_without_names(phase) for phase in order.phases if phase["from_step"] < done]
            for order in (before, self)
        )
        if were != are:
            changed.append(f"the phases before step {done} were {were}, are {are}")
        skipped = [SkippedBatches.of(order.skip).passed(done) for order in (before, self)]
        if skipped[0] != skipped[1]:
            was, now = ([list(one) for one in ranges] for ranges in skipped)
            changed.append(
                f"data.skip was {was}, is {now}, in what {done} steps have read (to read that "
                "again without it, branch_from an earlier state)"
            )
        return changed


def _without_names(phase: dict[str, Any]) -> dict[str, Any]:
    sources = [{k: v for k, v in s.items() if k != "name"} for s in phase["sources"]]
    return {**phase, "sources": sources}


def _listed(order: RowOrder) -> str:
    return ", ".join(f"{s['name']} (weight {s['weight']:g}, {s['content']})" for s in order.sources)


def row_order(config: TrainConfig) -> RowOrder:
    """Returns the order of the rows of a recipe.

    Raises:
      InputError: a folder of ``data.sources`` cannot be read.
    """
    first, *later = phases_of(config)
    return RowOrder(
        config.seed,
        **_of_phase(first.config),
        block_size=config.block_size,
        phases=[{"from_step": phase.first, **_of_phase(phase.config)} for phase in later],
        skip=[list(one) for one in SkippedBatches.of(config.data.skip).ranges],
    )


def _of_phase(config: TrainConfig) -> dict[str, Any]:
    sources: list[dict[str, Any]] = []
    for name, weight in config.data.sources.items():
        manifest = manifest_of(name)
        sources.append({"name": name, "content": manifest.content[:16], "weight": weight})
    return {
        "batch_rows": config.rows * config.accumulation,
        "row_length": config.row_length,
        "sources": sources,
    }


def begin_or_resume(
    config: TrainConfig,
    output: Path,
    logs: Path,
    states: Sequence[int],
    origin: Origin | None,
    *,
    allow_changed: bool,
) -> None:
    """Reports what has changed since a run's states were written, and saves the recipe.

    Every process of the run calls this; process 0 reads, decides and writes.

    Args:
      output, logs: the folders of the run and of its logs.
      states: the steps of the existing states, the same in all processes.
      origin: another run's state to begin with, if there are no states. Its recipe may differ,
        which is the purpose of branching, but not what its steps have read.
      allow_changed: continue with another recipe.

    Raises:
      InputError: in all processes: the run has states, but with this recipe they would be
        different, or trained on other rows.
    """
    refusal = ""
    if is_first():
        try:
            _begin_or_resume(config, output, logs, states, origin, allow_changed)
        except InputError as error:
            refusal = str(error)
    if refusal := text_of_first(refusal):
        raise InputError(refusal)


def _begin_or_resume(
    config: TrainConfig,
    output: Path,
    logs: Path,
    states: Sequence[int],
    origin: Origin | None,
    allowed: bool,
) -> None:
    order = row_order(config)
    run, done = (origin.run, origin.step) if origin else (output, max(states, default=0))
    if states or origin:
        before = _saved_order(run / ORDER)
        changes = _changed_fields(config, run, done)
        if origin:
            changes = {line: False for line in changes if not EACH_ITS_OWN.match(line)}
        changes |= dict.fromkeys(order.differences(before, done), True)
        for line in changes:
            print(f"not as {f'in {run}' if origin else 'before'}: {line}", flush=True)
        refused = [line for line, decisive in changes.items() if decisive]
        if refused and not allowed:
            begun = f"branch_from: {origin} began" if origin else f"{output}: this run began"
            raise InputError(
                f"{begun} with another recipe: {'; '.join(refused)}; {ALLOW} continues with this "
                f"one from step {done}" + ("" if origin else ", and another output starts over")
            )
        if done >= config.steps:
            say(
                f"{output}: trained for {done} steps already, and the recipe has "
                f"{config.steps}: nothing is left to train"
            )
        if changes:
            with (logs / CHANGES).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": done, "changed": list(changes)}) + "\n")
    elif (output / CONFIG).exists():
        say(f"{output}: no state was saved yet; training begins at step 1")
    save_config(config, output / CONFIG)
    write_json(output / ORDER, dataclasses.asdict(order))


def _saved_order(path: Path) -> RowOrder:
    """Reads the order that a run has saved next to its states."""
    try:
        return RowOrder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as the order of a run's rows ({error})") from None


def _changed_fields(config: TrainConfig, run: Path, done: int) -> dict[str, bool]:
    """Returns a line for each field whose value differs from the saved one, and whether the change
    is decisive. If the saved recipe cannot be read, prints that and returns none."""
    try:
        saved = _saved_fields(run)
    except Exception as error:
        reason = str(error).splitlines()[0]
        say(f"{run / CONFIG} cannot be read ({reason}), so changes of the recipe are not known")
        return {}
    now = field_values(dataclasses.asdict(config))
    lines, same_rates = {}, None
    for name, was in saved.items():
        if was == now[name]:
            continue
        decisive = not HARMLESS.fullmatch(name)
        if decisive and BY_RATE.fullmatch(name):
            if same_rates is None:
                same_rates = _same_rates(config, saved, done)
            decisive = not same_rates
        elif BY_CONTENT.fullmatch(name):
            decisive = False
        lines[f"{name} was {was}, is {now[name]}{REMARKS.get(name, '')}"] = decisive
    return lines


def _same_rates(config: TrainConfig, saved: dict[str, Any], done: int) -> bool:
    """Returns whether the first ``done`` steps have the learning rates of the saved recipe."""
    recipe = OmegaConf.structured(config)
    try:
        for name, value in saved.items():
            OmegaConf.update(recipe, name, value, merge=False)
        before = OmegaConf.to_object(recipe)
        assert isinstance(before, TrainConfig)
        were = schedule_of(before)
    except Exception:
        # A recipe that was edited by hand can raise anything. Rates that cannot be compared count
        # as different: the safe answer.
        return False
    steps = np.arange(done)
    was, now = (
        np.broadcast_to(np.asarray(jax.vmap(one)(steps)), done)
        for one in (were, schedule_of(config))
    )
    return bool(np.array_equal(was, now))
