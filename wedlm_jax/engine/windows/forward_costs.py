"""What the forwards of an engine cost: measured once, and kept beside the compiled programs.

Tested by tests/wedlm_jax/engine/windows/test_windowless.py.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from wedlm_jax.engine.device import Device
from wedlm_jax.engine.windows.cost import CostTable, kept_table, measure
from wedlm_jax.engine.windows.probe import ForwardProbe
from wedlm_jax.params import SamplingParams

WARM_UP_SECONDS = 3.0
"""Seconds of warming up after which no larger size is timed."""


def forward_costs(device: Device, mesh: Mesh | None, folder: Path | None = None) -> CostTable:
    """Returns the costs of forwards by their number of tokens, measured unless they are kept from
    an earlier process.

    Args:
      device: prepared for all traits that its programs will have, and not in use yet.
      mesh: of the model; None for one device.
      folder: where the engine's programs are kept; by default that of JAX's compilation cache.
    """
    return kept_table(folder or _cache_folder(), _key(device, mesh), lambda: _measured(device))


def _measured(device: Device) -> CostTable:
    params = SamplingParams(
        mode="verified" if device.traits.verified else "paper",
        draft_budget=0.0,
        entropy_threshold=None,
        ignore_eos=True,
        max_tokens=device.settings.max_text,
    )
    probe = ForwardProbe(device, params)
    sizes = device.settings.program(device.traits).sizes.tokens
    reach = probe.most_tokens
    started = time.perf_counter()
    for size in sizes:
        if size < reach:
            probe.time_forward(size)  # warms up: the first run of a program is slow
        if time.perf_counter() - started > WARM_UP_SECONDS:
            # A real model on a CPU: what is larger is worked out from what was timed.
            reach = min(reach, size)
            break
    if not device.traits.window:
        return measure(probe.time_forward, sizes, reach=reach, overhead=probe.overhead)
    everybody = device.settings.sequences_each
    probe.time_forward(everybody, windowless=True)
    return measure(
        probe.time_forward,
        sizes,
        reach=reach,
        overhead=probe.overhead,
        windowless=lambda: probe.time_forward(everybody, windowless=True),
        beside=everybody,
    )


def _key(device: Device, mesh: Mesh | None) -> dict[str, Any]:
    """Returns all that the costs depend on."""
    settings = device.settings
    return {
        "jax": jax.__version__,
        "devices": [jax.devices()[0].device_kind, len(jax.devices())],
        "model": dataclasses.asdict(device.config),
        "dtypes": sorted({str(x.dtype) for x in jax.tree.leaves(device.parameters)}),
        "mesh": None if mesh is None else dict(mesh.shape),
        "cache": [str(settings.cache_dtype), settings.page_size],
        "program": repr(settings.program(device.traits)),
    }


def _cache_folder() -> Path | None:
    """Returns the folder of JAX's compilation cache."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return None if folder is None else Path(folder)
