"""Settles what a recipe leaves to the run: `prediction_blocks: 0` and `loss.remat: auto`.

Prediction blocks: a block without trainable tokens, such as one of a prompt, is of no use in the
prediction stream: no token of other blocks sees it there, and no loss counts it. So the stream has
only the other blocks, at places that vary by row (`wedlm_jax.masks.DualStreamMask`). Their number
cannot vary, so it is that of the row with the most.

Recomputation: only the compiler knows how much memory a step takes. Each policy takes less than the
one before it, so a binary search, with the smallest possible micro-batches, finds the first that
fits in three compilations. Micro-batches are then made as large as fits. The result is remembered
in the folder of compiled programs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.data.sources import manifest_of
from train.program import TrainProgram, abstract_rows, make_program
from train.recipe.config import AUTO, TrainConfig
from train.recipe.phases import largest_phase, phases_of, source_names
from train.step_cost import peak_bytes
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.host.compiled_cache import folder_of_jax, recalled, remember
from wedlm_jax.host.processes import is_first, say, sum_over_all
from wedlm_jax.host.progress import saying_once
from wedlm_jax.model.layers import POLICIES
from wedlm_jax.packing import prediction_blocks, trainable_blocks

SPARE = 0.1
"""Share of a device's memory that a policy must leave free for fragmentation and other programs."""
KIND = "remat"

LEAST_TOKENS = 4096
"""The minimum number of tokens per device and micro-batch, in both streams. With fewer, gathering
weights would take longer than their products, by the bounds in docs/compile-report.md for v6e."""

PeakOf = Callable[[TrainConfig], int | None]
"""Maps a recipe to the compiler's peak of memory, in bytes on one device, for its `largest_phase`;
None if it does not fit."""


def first_that_fits(peaks: Sequence[Callable[[], int | None]], capacity: int, start: int) -> int:
    """Returns the index of the first peak that leaves `SPARE` of ``capacity`` bytes free.

    Args:
      peaks: functions that compile a program and return its peak; the peaks must not increase.
      capacity: memory of one device in bytes.
      start: the index to begin with; after it the search is binary.

    Raises:
      InputError: no peak leaves that much.
    """
    first, last, middle, least = 0, len(peaks), start, None
    while first < last:
        peak = peaks[middle]()
        if peak is not None and peak <= (1 - SPARE) * capacity:
            last = middle
        else:
            first, least = middle + 1, peak
        middle = (first + last) // 2
    if first < len(peaks):
        return first
    takes = "more than there is" if least is None else f"{least / 2**30:.1f} GiB"
    raise InputError(
        f"loss.remat: no policy leaves {SPARE:.0%} of a device's {capacity / 2**30:.1f} GiB free: "
        f"{POLICIES[-1]}, which takes least, takes {takes}; fewer rows with more accumulation take "
        f"less, and loss.remat={POLICIES[-1]} tries anyway"
    )


def possible_parts(config: TrainConfig, mesh: Mesh) -> list[int]:
    """Returns, in ascending order, into how many parts the micro-batches of all phases can be cut
    so that every device still has whole rows and `LEAST_TOKENS`. On a CPU they are not cut, since
    nothing would be gained."""
    batch, sequence = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["sequence"]
    if mesh.devices.flat[0].platform == "cpu":
        return [1]

    def can_be_cut(config: TrainConfig, parts: int) -> bool:
        rows, left = divmod(config.rows, parts * batch)
        return not left and rows * config.row_tokens // sequence >= LEAST_TOKENS

    phases = phases_of(config)
    cuts = range(2, config.rows // batch + 1)
    return [1, *(n for n in cuts if all(can_be_cut(phase.config, n) for phase in phases))]


def settled(
    config: TrainConfig,
    model: ModelConfig,
    mesh: Mesh,
    capacity: int | None,
    peak_of: PeakOf,
) -> TrainConfig:
    """Returns the recipe with a policy in place of ``auto``, and with enough micro-batches for it
    to fit; the recipe itself if it names a policy.

    Both apply to all phases, so they are those of the phase whose step takes the most memory. On a
    TPU the first policy is ``products``, since ``none`` reads from memory what could be recomputed
    as fast. A CPU has much memory for its speed, so the search begins with ``none`` there: usually
    the program that will run is then the only one compiled.

    Args:
      capacity: memory of one device in bytes; None if it is not known.

    Raises:
      InputError: no policy fits, or the capacity is not known.
    """
    if config.loss.remat != AUTO:
        return config
    device = mesh.devices.flat[0]
    kind, platform = device.device_kind, device.platform
    if capacity is None:
        raise InputError(
            f"loss.remat=auto: {kind} does not report how much memory it has; name a policy: "
            f"{', '.join(POLICIES)}"
        )
    policies = POLICIES[1:] if platform == "tpu" else POLICIES
    parts = possible_parts(config, mesh)
    key = _key(config, model, [kind, mesh.devices.size, capacity, parts])
    match recalled(folder_of_jax(), KIND, key):
        case [policy, count] if policy in policies and count in parts:
            how = "as remembered"
        case _:
            say("loss.remat: compiling to find what fits")
            peaks: list[Callable[[], int | None]]
            peaks = [partial(peak_of, chosen(config, policy, parts[-1])) for policy in policies]
            start = 0 if platform == "cpu" else len(peaks) // 2
            policy = policies[first_that_fits(peaks, capacity, start)]
            # The smallest micro-batches are known to fit with it.
            peaks = [partial(peak_of, chosen(config, policy, count)) for count in parts[:-1]]
            peaks.append(lambda: 0)
            count = parts[first_that_fits(peaks, capacity, (len(peaks) - 1) // 2)]
            how = "found by compiling"
    # All processes must run the same program, even if they remember different results.
    found = np.array([POLICIES.index(policy), count]) if is_first() else np.zeros(2, np.int64)
    index, count = (int(number) for number in sum_over_all(found))
    policy = POLICIES[index]
    if is_first():
        remember(folder_of_jax(), KIND, key, [policy, count])
    settled = chosen(config, policy, count)
    cut = f", {settled.rows} rows in each of {settled.accumulation} micro-batches"
    say(f"loss.remat: {policy}{cut if count > 1 else ''}, {how}")
    return settled


def settled_here(program: TrainProgram) -> TrainProgram:
    """Returns the program of the `settled` recipe for the mesh's devices. Call this under
    ``jax.set_mesh(program.mesh)``."""
    config, model, mesh = program.config, program.model, program.mesh

    def peak_of(config: TrainConfig) -> int | None:
        rows = abstract_rows(largest_phase(config).config, mesh, len(source_names(config)))
        try:
            with saying_once(f"compiling the step with loss.remat={config.loss.remat}"):
                return peak_bytes(make_program(config, model, mesh).compile(rows))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None

    capacity = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if mesh.devices.flat[0].platform == "cpu":
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    result = settled(config, model, mesh, capacity, peak_of)
    return program if result is config else make_program(result, model, mesh)


def chosen(config: TrainConfig, policy: str, parts: int = 1) -> TrainConfig:
    """Returns the recipe with this policy, and each of its micro-batches cut into ``parts``."""

    def cut(rows: int | None, accumulation: int | None) -> dict[str, Any]:
        return {
            "rows": rows and rows // parts,
            "accumulation": accumulation and accumulation * parts,
        }

    phases = [
        dataclasses.replace(phase, **cut(phase.rows, phase.accumulation)) for phase in config.phases
    ]
    loss = dataclasses.replace(config.loss, remat=policy)
    sizes = cut(config.rows, config.accumulation)
    return dataclasses.replace(config, loss=loss, phases=phases, **sizes)


def _key(config: TrainConfig, model: ModelConfig, devices: list[Any]) -> dict[str, Any]:
    """Returns everything that the memory of a step depends on."""
    fields = dataclasses.asdict(largest_phase(config).config)
    sizes = ("rows", "accumulation", "row_length", "block_size", "prediction_blocks")
    kinds = ("objective", "quantized_training", "mesh", "loss", "lora")
    given = {name: fields[name] for name in (*sizes, *kinds)}
    optimizer = fields["optimizer"]
    given |= {name: optimizer[name] for name in ("name", "first_moment_dtype")}
    given |= {"averaged": optimizer["average"] > 0, "norms": fields["metrics"]["norms"]}
    # A resumed run reads its own description, which is a WeDLM's even if it began with another.
    model = dataclasses.replace(model, model_type="wedlm")
    return given | {"model": repr(model), "devices": devices, "jax": jax.__version__}


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
                f"{name} is {given}, but a row of the data has {needed} blocks with tokens to "
                "train on; 0 makes room for as many as needed"
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
    needed = int(trainable_blocks(trainable, size).sum(-1).max(initial=0))
    room = _room(config, needed, sequence)
    if config.objective != "wedlm" or room * size == config.row_length:
        return rows
    return rows | {
        "prediction_blocks": np.stack([prediction_blocks(row, size, room) for row in trainable])
    }


def needed_by_sources(config: TrainConfig) -> int:
    """Returns the most blocks with a trainable token in any row of ``data.sources``.

    Raises:
      InputError: a folder cannot be read.
    """
    return max(manifest_of(name).most_trainable_blocks for name in config.data.sources)
