"""What a train step costs: its matrix products, the memory of a device, and the device's peak.

Products are worked out from the sizes, a multiply-add being two: the compiler's own count leaves
the attention kernel out and takes the body of a loop once.
"""

from __future__ import annotations

import jax

from train.config import TrainConfig
from train.step import TrainState
from wedlm_jax.aot.topology import CHIPS, local_bytes
from wedlm_jax.attention.blockwise import TileGrid
from wedlm_jax.config import ModelConfig

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
SPLASH_TILE = 512
# Products over each visible tile. The kernels of the backward pass (one for the queries' gradient,
# one for that of keys and values) compute the scores and their gradient anew, each for itself.
_FORWARD, _BACKWARD_SPLASH, _BACKWARD = 2, 7, 5


def forward_flops(model: ModelConfig, rows: int, row_length: int, *, streams: int = 2) -> float:
    """Products of the forward pass over packed rows, of what is visible only.

    Each stream passes through every layer and the head. A query of either stream sees half
    the row on average (both its own block and the memory are triangles), hence L²/2 pairs a row.

    Args:
      model: its shape.
      rows: packed rows, all micro-batches together.
      row_length: L.
      streams: 2 for the dual stream, 1 for plain next-token training.
    """
    pairs = streams * rows * row_length**2 / 2
    return streams / 2 * _matrix_flops(model, rows, row_length) + 4 * _width(model) * pairs


def model_flops(config: TrainConfig, model: ModelConfig) -> float:
    """Products of a step, forward and backward, nothing computed anew counted: what MFU is
    relative to."""
    streams = 2 if config.objective == "wedlm" else 1
    rows = config.rows * config.accumulation
    return 3 * forward_flops(model, rows, config.row_length, streams=streams)


def program_flops(config: TrainConfig, model: ModelConfig, rows: int) -> float:
    """Products that the step's program does for ``rows`` packed rows: what the backward pass
    computes anew counts, and tiles of attention count whole.

    The head is computed anew in any case; the layers with ``remat: full``.
    """
    length = config.row_length
    head = 2 * model.hidden_size * model.vocab_size * 2 * rows * length
    layers = _matrix_flops(model, rows, length) - head
    again = config.loss.remat == "full"
    attention = _FORWARD * (1 + again)
    attention += _BACKWARD_SPLASH if config.loss.attention == "splash" else _BACKWARD
    products = 2 * _width(model) * visible_pairs(config) * rows * attention
    return (4 if again else 3) * layers + 4 * head + products


def visible_pairs(config: TrainConfig) -> int:
    """Pairs of a query and a key in the tiles that the kernel visits, of one row."""
    tile = min(SPLASH_TILE, config.row_length)
    length = -(-config.row_length // tile) * tile
    return len(TileGrid(2, length, tile, config.block_size).visible()) * tile**2


def _matrix_flops(model: ModelConfig, rows: int, row_length: int) -> float:
    matrices = model.num_parameters(embeddings=False) + model.hidden_size * model.vocab_size
    return 2 * matrices * 2 * rows * row_length


def _width(model: ModelConfig) -> int:
    """Scores and values of one pair take two products of this width, all layers together."""
    return model.num_attention_heads * model.head_dim * model.num_hidden_layers


def peak_flops(device: jax.Device) -> float | None:
    """Returns the bfloat16 FLOP/s of a device; None where it is not known, as for a CPU."""
    kinds = [kind for kind in PEAK_FLOPS if device.device_kind.startswith(kind)]
    return PEAK_FLOPS[max(kinds, key=len)] if kinds else None


def describe_budget(state: TrainState, compiled: jax.stages.Compiled) -> str:
    """Says in a line what parameters, optimizer and the compiler's peak take of one device."""
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
