"""`loss.remat: auto`: the policy that computes least anew and fits, found by compiling.

How much a policy holds is the compiler's to say. Each holds less than the one before it, so halving
the list finds the first that fits in three compilations. What was found is remembered beside the
compiled programs, and not looked for again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.program import TrainProgram, abstract_rows, make_program
from train.recipe.config import AUTO, TrainConfig
from train.recipe.phases import largest_phase, source_names
from train.step_cost import peak_bytes
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import write_json
from wedlm_jax.host.processes import is_first, say, sum_over_all
from wedlm_jax.model.rematerialisation import POLICIES

SPARE = 0.1
"""Share of a device's memory that a policy must leave free, for fragments and what else runs."""
REMEMBERED = "remat.json"

PeakOf = Callable[[str], int | None]
"""The compiler's peak in bytes on one device of the step with a policy; None if it does not fit."""


def cheapest_policy(peak_of: PeakOf, capacity: int, *, likely: int | None = None) -> str:
    """Returns the first of `POLICIES` whose peak leaves `SPARE` of ``capacity`` bytes.

    Args:
      peak_of: compiles the step with a policy.
      capacity: of one device.
      likely: the index to begin with; the middle by default.

    Raises:
      InputError: none does.
    """
    first, last, least = 0, len(POLICIES), None
    while first < last:
        middle = (first + last) // 2 if likely is None else likely
        likely = None
        peak = peak_of(POLICIES[middle])
        if peak is not None and peak <= (1 - SPARE) * capacity:
            last = middle
        else:
            first, least = middle + 1, peak
    if first < len(POLICIES):
        return POLICIES[first]
    takes = "more than there is" if least is None else f"{least / 2**30:.1f} GiB"
    raise InputError(
        f"loss.remat: no policy leaves {SPARE:.0%} of a device's {capacity / 2**30:.1f} GiB: "
        f"{POLICIES[-1]}, which takes least, takes {takes}; fewer rows with more accumulation take "
        f"less, and loss.remat={POLICIES[-1]} tries all the same"
    )


def settled(
    config: TrainConfig,
    model: ModelConfig,
    devices: Sequence[Any],
    capacity: int | None,
    peak_of: PeakOf,
    say_it: Callable[[str], None] = say,
) -> TrainConfig:
    """Returns the recipe with a policy in place of ``auto``; the recipe itself if it names one.

    The policy is for all phases, so it is that of the one whose step takes the most memory. A CPU
    has much memory beside what it computes, so the search begins with ``none`` there: the program
    that will run is then the only one compiled.

    Args:
      config, model: what is compiled.
      devices: for which.
      capacity: bytes of memory of one; None where it is not known.
      peak_of: compiles the step of `largest_phase` with a policy.
      say_it: told what was chosen.

    Raises:
      InputError: no policy fits, or the capacity is not known.
    """
    if config.loss.remat != AUTO:
        return config
    kind = devices[0].device_kind
    if capacity is None:
        raise InputError(
            f"loss.remat=auto: {kind} does not say how much memory it has; name a policy: "
            f"{', '.join(POLICIES)}"
        )
    memory = _Memory(_key(config, model, kind, len(devices), capacity))
    known = memory.recall()
    if known is None:
        say_it("loss.remat: compiling to find what fits")
    likely = 0 if devices[0].platform == "cpu" else None
    policy = known or cheapest_policy(peak_of, capacity, likely=likely)
    # All processes must run the same program, whatever each of them remembers.
    index = sum_over_all(np.array([POLICIES.index(policy) if is_first() else 0]))[0]
    policy = POLICIES[int(index)]
    memory.keep(policy)
    say_it(f"loss.remat: {policy}, {'as remembered' if known else 'found by compiling'}")
    return with_policy(config, policy)


def settled_here(program: TrainProgram) -> TrainProgram:
    """Returns the program of the `settled` recipe for the mesh's own devices. Called under
    ``jax.set_mesh(program.mesh)``."""
    config, model, mesh = program.config, program.model, program.mesh
    devices = mesh.devices.flat
    rows = abstract_rows(largest_phase(config).config, mesh, len(source_names(config)))

    def peak_of(policy: str) -> int | None:
        own = make_program(with_policy(config, policy), model, mesh)
        try:
            return peak_bytes(own.compile(rows))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None

    capacity = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if devices[0].platform == "cpu":
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    chosen = settled(config, model, list(devices), capacity, peak_of)
    return program if chosen is config else make_program(chosen, model, mesh)


def with_policy(config: TrainConfig, policy: str) -> TrainConfig:
    """Returns the recipe with this policy."""
    return dataclasses.replace(config, loss=dataclasses.replace(config.loss, remat=policy))


def _key(config: TrainConfig, model: ModelConfig, kind: str, count: int, capacity: int) -> str:
    """Names everything that the memory of a step depends on."""
    fields = dataclasses.asdict(largest_phase(config).config)
    sizes = ("rows", "accumulation", "row_length", "block_size", "prediction_blocks")
    kinds = ("objective", "quantized_training", "mesh", "loss", "lora")
    given = {name: fields[name] for name in (*sizes, *kinds)}
    optimizer = fields["optimizer"]
    given |= {name: optimizer[name] for name in ("name", "first_moment_dtype")}
    given |= {"averaged": optimizer["average"] > 0, "norms": fields["metrics"]["norms"]}
    given |= {"model": repr(model), "devices": [kind, count, capacity], "jax": jax.__version__}
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


class _Memory:
    """Remembers policies that were found, by key, in the folder of compiled programs, if there is
    one."""

    def __init__(self, key: str):
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        self._path = Path(folder) / REMEMBERED if folder and "://" not in folder else None
        self._key = key

    def recall(self) -> str | None:
        policy = self._all().get(self._key)
        return policy if policy in POLICIES else None

    def keep(self, policy: str) -> None:
        if self._path is None or not is_first() or self._all().get(self._key) == policy:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self._all() | {self._key: policy})

    def _all(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # it only saves time
        return found if isinstance(found, dict) else {}
