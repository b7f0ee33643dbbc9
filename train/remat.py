"""`loss.remat: auto`: finds, by compiling, the policy that recomputes least and fits into memory,
and the size of micro-batches.

Only the compiler knows how much memory a step takes. Each policy takes less than the one before it,
so a binary search, with the smallest possible micro-batches, finds the first that fits in three
compilations. Micro-batches are then made as large as fits. The result is remembered in the folder
of compiled programs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.program import TrainProgram, abstract_rows, make_program
from train.recipe.config import AUTO, TrainConfig
from train.recipe.phases import largest_phase, phases_of, source_names
from train.step_cost import peak_bytes
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import write_json
from wedlm_jax.host.processes import is_first, say, sum_over_all
from wedlm_jax.host.progress import saying_once
from wedlm_jax.model.layers import POLICIES

SPARE = 0.1
"""Share of a device's memory that a policy must leave free, for fragmentation and other programs.
"""
REMEMBERED = "remat.json"

LEAST_TOKENS = 4096
"""The least tokens of a device per micro-batch, of both streams. With fewer, gathering weights
would take longer than their products, by the bounds in docs/compile-report.md for v6e."""

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
      InputError: none does.
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
        f"loss.remat: no policy leaves {SPARE:.0%} of a device's {capacity / 2**30:.1f} GiB: "
        f"{POLICIES[-1]}, which takes least, takes {takes}; fewer rows with more accumulation take "
        f"less, and loss.remat={POLICIES[-1]} tries all the same"
    )


def possible_parts(config: TrainConfig, mesh: Mesh) -> list[int]:
    """Returns, in ascending order, into how many parts the micro-batches of all phases can be cut
    such that every device still has whole rows and `LEAST_TOKENS`. On a CPU they are not cut, since
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
    say_it: Callable[[str], None] = say,
) -> TrainConfig:
    """Returns the recipe with a policy in place of ``auto``, and with enough micro-batches for it
    to fit; the recipe itself if it names a policy.

    Both apply to all phases, so they are those of the phase whose step takes the most memory. On a
    TPU the first policy is ``products``, since ``none`` reads from memory what could be recomputed
    as fast. A CPU has much memory for its speed, so the search begins with ``none`` there: usually
    the program that will run is then the only one compiled.

    Args:
      config, model: what is compiled.
      mesh: the devices to compile for.
      capacity: memory of one device in bytes; None if it is not known.
      peak_of: compiles the step of `largest_phase`.
      say_it: called with a message about the choice.

    Raises:
      InputError: no policy fits, or the capacity is not known.
    """
    if config.loss.remat != AUTO:
        return config
    device = mesh.devices.flat[0]
    kind, platform = device.device_kind, device.platform
    if capacity is None:
        raise InputError(
            f"loss.remat=auto: {kind} does not say how much memory it has; name a policy: "
            f"{', '.join(POLICIES)}"
        )
    policies = POLICIES[1:] if platform == "tpu" else POLICIES
    parts = possible_parts(config, mesh)
    memory = _Memory(_key(config, model, [kind, mesh.devices.size, capacity, parts]))
    known = memory.recall(policies, parts)
    if known is None:
        say_it("loss.remat: compiling to find what fits")
        peaks: list[Callable[[], int | None]]
        peaks = [partial(peak_of, chosen(config, policy, parts[-1])) for policy in policies]
        start = 0 if platform == "cpu" else len(peaks) // 2
        policy = policies[first_that_fits(peaks, capacity, start)]
        # The smallest micro-batches are known to fit with it.
        peaks = [partial(peak_of, chosen(config, policy, count)) for count in parts[:-1]]
        peaks.append(lambda: 0)
        known = policy, parts[first_that_fits(peaks, capacity, (len(peaks) - 1) // 2)]
        how = "found by compiling"
    else:
        how = "as remembered"
    # All processes must run the same program, even if they remember different results.
    found = np.array([POLICIES.index(known[0]), known[1]]) if is_first() else np.zeros(2, np.int64)
    index, count = (int(number) for number in sum_over_all(found))
    memory.keep((POLICIES[index], count))
    settled = chosen(config, POLICIES[index], count)
    cut = f", {settled.rows} rows in each of {settled.accumulation} micro-batches"
    say_it(f"loss.remat: {POLICIES[index]}{cut if count > 1 else ''}, {how}")
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


def _key(config: TrainConfig, model: ModelConfig, devices: list[Any]) -> str:
    """Returns a digest of everything that the memory of a step depends on."""
    fields = dataclasses.asdict(largest_phase(config).config)
    sizes = ("rows", "accumulation", "row_length", "block_size", "prediction_blocks")
    kinds = ("objective", "quantized_training", "mesh", "loss", "lora")
    given = {name: fields[name] for name in (*sizes, *kinds)}
    optimizer = fields["optimizer"]
    given |= {name: optimizer[name] for name in ("name", "first_moment_dtype")}
    given |= {"averaged": optimizer["average"] > 0, "norms": fields["metrics"]["norms"]}
    # A resumed run reads its own description, which is a WeDLM's even if it began with another.
    model = dataclasses.replace(model, model_type="wedlm")
    given |= {"model": repr(model), "devices": devices, "jax": jax.__version__}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


class _Memory:
    """Remembers results by key in the folder of compiled programs, if there is one."""

    def __init__(self, key: str):
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        self._path = Path(folder) / REMEMBERED if folder and "://" not in folder else None
        self._key = key

    def recall(self, policies: Sequence[str], parts: Sequence[int]) -> tuple[str, int] | None:
        """Returns the remembered policy and number of parts, if they are still possible."""
        match self._all().get(self._key):
            case [policy, count] if policy in policies and count in parts:
                return policy, count
        return None

    def keep(self, found: tuple[str, int]) -> None:
        if self._path is None or not is_first() or self._all().get(self._key) == [*found]:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self._all() | {self._key: [*found]})

    def _all(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # it only saves time
        return found if isinstance(found, dict) else {}
