"""What a step takes of a device's memory, and how much of the device's speed it uses."""

from __future__ import annotations

import math
from typing import Any

import jax

from train.config import TrainConfig
from train.step import TrainState
from wedlm_jax.config import ModelConfig

GIB = 2**30

PEAK_FLOPS = {
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
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


def forward_flops(model: ModelConfig, rows: int, row_length: int, *, streams: int = 2) -> float:
    """Products of the forward pass over packed rows: a multiply-add is two.

    Each stream passes through every layer and the head. A query of either stream sees half
    the row on average (both its own block and the memory are triangles).

    Args:
      model: its shape.
      rows: of the global batch.
      row_length: L.
      streams: 2 for the dual stream, 1 for plain next-token training.
    """
    matrices = model.num_parameters(embeddings=False) + model.hidden_size * model.vocab_size
    pairs = streams * rows * row_length**2 / 2
    width = model.num_attention_heads * model.head_dim
    return 2 * matrices * streams * rows * row_length + 4 * width * pairs * model.num_hidden_layers


def step_flops(config: TrainConfig, model: ModelConfig) -> float:
    """Products of a training step: forward and backward, nothing computed anew counted."""
    streams = 2 if config.objective == "wedlm" else 1
    rows = config.rows * config.accumulation
    return 3 * forward_flops(model, rows, config.row_length, streams=streams)


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
