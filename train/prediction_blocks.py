"""`prediction_blocks`: how many of a row's blocks its prediction stream has room for.

A block without trainable tokens, such as one of a prompt, is of no use in the prediction stream: no
token of other blocks sees it there, and no loss counts it. So the stream has only the other blocks,
at places that vary by row (`wedlm_jax.masks.DualStreamMask`). Their number cannot vary, and is that
of the row with the most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from train.data.shards import read_manifest
from train.recipe.config import TrainConfig
from train.recipe.phases import phases_of
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import say
from wedlm_jax.host.storage import folder_of_this_machine
from wedlm_jax.packing import prediction_blocks, trainable_blocks


def with_prediction_blocks(
    config: TrainConfig, needed: Callable[[TrainConfig], int | None], sequence: int
) -> TrainConfig:
    """Returns the recipe with ``prediction_blocks`` set, in each of its phases.

    Args:
      config: the recipe; 0 is replaced by what the data needs.
      needed: maps a phase's recipe to the most blocks with a trainable token in one of its rows;
        None if that is not known.
      sequence: how many devices share the tokens of a row, whose number they must divide.

    Raises:
      InputError: the recipe's number is less than needed, or more than a row has.
    """
    if config.objective != "wedlm":
        return config
    numbers = []
    for number, phase in enumerate(phases_of(config)):
        name = f"phases[{number - 1}].prediction_blocks" if number else "prediction_blocks"
        numbers.append(_chosen(phase.config, name, needed(phase.config), sequence))
    sections = [
        dataclasses.replace(section, prediction_blocks=count)
        for section, count in zip(config.phases, numbers[1:], strict=True)
    ]
    return dataclasses.replace(config, prediction_blocks=numbers[0], phases=sections)


def _chosen(config: TrainConfig, name: str, needed: int | None, sequence: int) -> int:
    given, count = config.prediction_blocks, config.row_length // config.block_size
    if given > count:
        raise InputError(
            f"{name} must be at most {count}, the blocks of a row of {config.row_length} tokens, "
            f"not {given}"
        )
    if given:
        if needed is not None and given < needed:
            raise InputError(
                f"{name} {given}: a row of the data has {needed} blocks with tokens to train on; 0 "
                "makes room for as many as are needed"
            )
        return given
    if needed is None:
        return count
    chosen = _room(config, needed, sequence)
    if chosen < count:
        say(f"{name}: the prediction stream has room for {chosen} of a row's {count} blocks")
    return chosen


def _room(config: TrainConfig, needed: int, sequence: int) -> int:
    """Returns the smallest number of blocks, at least ``needed``, that the mesh can divide."""
    count = config.row_length // config.block_size
    room = max(needed, 1)
    while room < count and (config.row_length + room * config.block_size) % sequence:
        room += 1
    return min(room, count)


def blocks_of_rows(
    rows: dict[str, np.ndarray], config: TrainConfig, sequence: int
) -> dict[str, np.ndarray]:
    """Adds the places of prediction blocks to rows ``[N, L]``, if any block can be left out."""
    trainable, size = rows["trainable"], config.block_size
    room = _room(config, most_trainable_blocks(trainable, size), sequence)
    if config.objective != "wedlm" or room * size == config.row_length:
        return rows
    return rows | {
        "prediction_blocks": np.stack([prediction_blocks(row, size, room) for row in trainable])
    }


def most_trainable_blocks(trainable: np.ndarray, block_size: int) -> int:
    """Returns the most blocks with a trainable token in any of the rows ``[N, L]``."""
    return int(trainable_blocks(trainable, block_size).sum(-1).max(initial=0))


def needed_by_sources(config: TrainConfig) -> int | None:
    """Returns the most blocks with a trainable token in any row of ``data.sources``; None if a
    folder does not record it.

    Raises:
      InputError: a folder cannot be read.
    """
    most = 0
    for name in config.data.sources:
        manifest = read_manifest(folder_of_this_machine(name, "data.sources"))
        if manifest.most_trainable_blocks is None:
            if manifest.trainable_tokens < manifest.tokens:
                say(
                    f"{name}: tokenised by an earlier version, which did not count blocks without "
                    "a token to train on, so they stay in the prediction stream; tokenise it again "
                    "to leave them out"
                )
            return None
        most = max(most, manifest.most_trainable_blocks)
    return most
