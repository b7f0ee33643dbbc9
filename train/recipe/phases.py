"""The phases of a run: what changes at given steps.

A recipe is its own first phase. In a later one some fields have other values; the others stay as
they were.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from train.recipe.config import TrainConfig
from wedlm_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Phase:
    """Describes a stretch of a run.

    Attributes:
      first, stop: its first step, and the one after its last, counted from 0.
      config: the recipe during the phase, without phases.
    """

    first: int
    stop: int
    config: TrainConfig

    @property
    def batch_shape(self) -> tuple[int, int, int, int]:
        """Returns (A, R, L, N) of a global batch: micro-batches, rows, and tokens in a row's memory
        stream and prediction stream."""
        config = self.config
        return config.accumulation, config.rows, config.row_length, config.prediction_length


def phases_of(config: TrainConfig) -> list[Phase]:
    """Returns the phases of a recipe, at least one.

    Raises:
      InputError: phases that are not in order, or change what they cannot.
    """
    configs = [(0, dataclasses.replace(config, phases=[]))]
    for number, section in enumerate(config.phases):
        name, (before, whole) = f"phases[{number}]", configs[-1]
        if not before < section.from_step < config.steps:
            raise InputError(
                f"{name}.from_step must be {before + 1} to {config.steps - 1}, after the phase "
                f"before and below steps, not {section.from_step}"
            )
        if section.row_length and section.row_length % config.block_size:
            raise InputError(
                f"{name}.row_length {section.row_length} is not a multiple of "
                f"block_size {config.block_size}"
            )
        if section.row_length and not section.sources:
            raise InputError(f"{name}.row_length needs sources with rows of this length")
        if section.learning_rate and not config.optimizer.learning_rate:
            raise InputError(
                f"{name}.learning_rate: cannot scale optimizer.learning_rate, which is 0"
            )
        configs.append((section.from_step, _changed(whole, section)))
    ends = [first for first, _ in configs[1:]] + [config.steps]
    return [Phase(first, end, one) for (first, one), end in zip(configs, ends, strict=True)]


def source_names(config: TrainConfig) -> list[str]:
    """Lists the sources of a recipe's phases, in order. If a recipe names none, which is enough to
    compile it, a single "" stands for them."""
    named = [config.data.sources, *(phase.sources for phase in config.phases)]
    return list(dict.fromkeys(name for sources in named for name in sources)) or [""]


def largest_phase(config: TrainConfig) -> Phase:
    """Returns the phase whose micro-batches have the most tokens, so whose step takes the most
    memory."""
    return max(phases_of(config), key=lambda phase: phase.config.rows * phase.config.row_tokens)


def _changed(config: TrainConfig, section: Any) -> TrainConfig:
    sizes = {
        name: getattr(section, name)
        for name in ("rows", "accumulation", "row_length", "prediction_blocks")
        if getattr(section, name) is not None
    }
    data, optimizer = config.data, config.optimizer
    if section.sources:
        data = dataclasses.replace(data, sources=dict(section.sources))
    if section.learning_rate is not None:
        optimizer = dataclasses.replace(optimizer, learning_rate=section.learning_rate)
    return dataclasses.replace(config, data=data, optimizer=optimizer, **sizes)
