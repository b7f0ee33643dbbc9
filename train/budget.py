"""What a step takes of a device's memory, and how much of the device's speed it uses."""

from __future__ import annotations

import math
from typing import Any

import jax

from train.step import TrainState
from wedlm_jax.aot.topology import CHIPS

GIB = 2**30

PEAK_FLOPS = {
    "TPU v5 lite": CHIPS["v5e"].peak_flops,
    "TPU v5": CHIPS["v5p"].peak_flops,
    "TPU v6 lite": CHIPS["v6e"].peak_flops,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""bfloat16 FLOP/s without sparsity by the beginning of a device's kind, from their makers."""


def peak_flops(device: jax.Device) -> float | None:
    """bfloat16 FLOP/s of a device; None where it is not known, as for a CPU."""
    kinds = [kind for kind in PEAK_FLOPS if device.device_kind.startswith(kind)]
    return PEAK_FLOPS[max(kinds, key=len)] if kinds else None


def local_bytes(tree: Any) -> int:
    """What one device holds of a tree of arrays or their shapes."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def describe_budget(state: TrainState, compiled: jax.stages.Compiled) -> str:
    """Parameters, optimizer, and the compiler's peak, of one device, in a line."""
    device = jax.local_devices()[0]
    parameters, optimizer = local_bytes(state.parameters), local_bytes(state.optimizer)
    parts = [f"parameters {_gib(parameters)}", f"optimizer {_gib(optimizer)}"]
    memory = compiled.memory_analysis()
    peak = getattr(memory, "peak_memory_in_bytes", 0) or 0
    if peak:
        parts.append(f"activations and the rest {_gib(max(peak - parameters - optimizer, 0))}")
        parts.append(f"peak {_gib(peak)}")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    of = f" of {_gib(limit)}" if limit else ""
    return f"memory of a device{of}: {', '.join(parts)} (by the compiler)"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
