"""A run that is given again with another recipe: what changed is told, and what would change
the order of its data is refused.

Step s of a run reads what `RowOrder` decides. The states of a run do not say on what rows they
were trained, so the run says it beside them, in `order.json`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tokenizers import Tokenizer

from train.data.manifest import read_manifest
from train.data.synthetic import rows_recipe
from train.recipe.config import TrainConfig, describe, save_config
from train.recipe.phases import phases_of
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import write_json
from wedlm_jax.host.processes import is_first, say, wait_for_all
from wedlm_jax.host.storage import folder_of_this_machine

CONFIG = "config.yaml"
ORDER = "order.json"
ALLOW = "allow_other_data"

REMARKS = {
    "accumulation": "; masks are drawn for each micro-batch, so they are others",
    "model.init_from": "; the run goes on from its own states and does not read it",
}
"""What a changed field means, where its name does not say."""


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Holds all that decides which rows a step reads.

    Attributes:
      seed: of the order, and of the masks.
      batch_rows: rows x accumulation.
      row_length, block_size: of the rows.
      sources: content and weight of each set of rows, in the recipe's order. Where it lies does
        not matter.
      phases: the same of each later phase, and the step from which it counts.
    """

    seed: int
    batch_rows: int
    row_length: int
    block_size: int
    sources: list[dict[str, Any]]
    phases: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def differences(self, before: RowOrder, done: int) -> list[str]:
        """Lists what is not as before, by the recipe's names, in what ``done`` steps have read."""
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
        return changed


def _without_names(phase: dict[str, Any]) -> dict[str, Any]:
    sources = [{k: v for k, v in s.items() if k != "name"} for s in phase["sources"]]
    return {**phase, "sources": sources}


def _listed(order: RowOrder) -> str:
    return ", ".join(f"{s['name']} (weight {s['weight']:g}, {s['content']})" for s in order.sources)


def row_order(config: TrainConfig, tokenizer: Tokenizer) -> RowOrder:
    """Returns the order of the rows of a recipe.

    Raises:
      InputError: a folder of ``data.sources`` cannot be read.
    """
    first, *later = phases_of(config)
    return RowOrder(
        config.seed,
        **_of_phase(first.config, tokenizer),
        block_size=config.block_size,
        phases=[
            {"from_step": phase.first, **_of_phase(phase.config, tokenizer)} for phase in later
        ],
    )


def _of_phase(config: TrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    sources: list[dict[str, Any]] = []
    for name, weight in config.data.sources.items():
        manifest = read_manifest(folder_of_this_machine(name, "data.sources"))
        sources.append({"name": name, "content": manifest.content[:16], "weight": weight})
    if not sources:
        digest = hashlib.sha256(rows_recipe(config, tokenizer).encode()).hexdigest()[:16]
        sources = [{"name": "the synthetic corpus", "content": digest, "weight": 1.0}]
    return {
        "batch_rows": config.rows * config.accumulation,
        "row_length": config.row_length,
        "sources": sources,
    }


def begin_or_resume(
    config: TrainConfig, tokenizer: Tokenizer, output: Path, states: Sequence[int]
) -> None:
    """Tells what has changed since a run's states were written, and writes down the recipe.

    Every process of the run calls this.

    Args:
      states: the steps of the states that there are.

    Raises:
      InputError: the run has states, and would go on with other rows than they were trained
        on, or in another order; ``allow_other_data`` allows it.
    """
    order = row_order(config, tokenizer)
    changes = _changed_fields(config, output / CONFIG) if states else []
    before = _saved_order(output / ORDER) if states else None
    differences = order.differences(before, max(states)) if before else []
    if differences and not config.allow_other_data:
        raise InputError(
            f"{output}: this run would go on with other data than it began with: "
            f"{'; '.join(differences)}; {ALLOW}=true allows it, and another output begins anew"
        )
    for line in [*changes, *differences]:
        say(f"not as before: {line}")
    if not states and (output / CONFIG).exists():
        say(f"{output}: no state was saved yet; training begins at step 1")
    elif states and max(states) >= config.steps:
        say(
            f"{output}: trained for {max(states)} steps already, and the recipe has "
            f"{config.steps}: nothing is left to train"
        )
    if states and before is None:
        say(f"{output / ORDER} is not there: whether the data is as before is not known")
    wait_for_all("recipe compared")  # before the first writes, all have read
    if is_first():
        save_config(config, output / CONFIG)
        write_json(output / ORDER, dataclasses.asdict(order))


def _saved_order(path: Path) -> RowOrder | None:
    """Reads the saved order; None where there is none, as in runs of earlier versions."""
    try:
        return RowOrder(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: not what a run writes ({error}); remove it") from None


def _changed_fields(config: TrainConfig, path: Path) -> list[str]:
    """Writes a line for each field whose value is not the saved one."""
    try:
        saved = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except Exception as error:
        # A YAML parser has many error types of its own.
        return [f"what, is not known: {path} cannot be read ({str(error).splitlines()[0]})"]
    now = dataclasses.asdict(config)
    lines = []
    for name, _, _ in describe():
        was, there = _at(saved, name)
        new, _ = _at(now, name)
        if there and was != new and name != ALLOW:
            lines.append(f"{name} was {was}, is {new}{REMARKS.get(name, '')}")
    return lines


def _at(tree: Any, name: str) -> tuple[Any, bool]:
    """Returns the value of a dotted name, and whether there is one."""
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return None, False
        tree = tree[part]
    return tree, True
