"""The costs of a training step: its matrix products, the memory of a device, and the device's peak.

FLOP of products are computed from sizes, counting a multiply-add as two, because the compiler's
count omits the attention kernel and counts the body of a loop once.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from train.recipe.config import TrainConfig
from train.step import TrainState
from wedlm_jax.aot.topology import CHIPS
from wedlm_jax.attention.dispatch import DEFAULT_TILE
from wedlm_jax.attention.tiles import TileGrid, padded, tile_side
from wedlm_jax.config import ModelConfig
from wedlm_jax.model.layers import KEPT
from wedlm_jax.sharding import local_bytes

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
"""Published bfloat16 FLOP/s without sparsity, by prefix of the device's kind."""
# Products over each visible tile: scores and values; in the backward pass the scores again, and the
# gradients of values, weights, queries and keys.
_FORWARD, _BACKWARD = 2, 5


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """The FLOP of a step, in products with parameters and in attention."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        return self.products + self.attention


def model_flops(config: TrainConfig, model: ModelConfig) -> float:
    """Returns the FLOP of a step without recomputation, forward and backward, for MFU. Only visible
    pairs and tokens with a target count.

    Each stream goes through every layer. A query of either stream sees half the row on average
    (both its own block and the memory are triangles), hence L²/2 pairs per row and stream.
    """
    products = _row_products(config, model)
    # Forward once, and twice as much backward for tokens with a backward pass.
    tokens = config.row_tokens + 2 * _learning_tokens(config)
    attention = 2 * _FORWARD * _width(model) * tokens * config.row_length / 2
    return config.rows * config.accumulation * (products + attention)


def program_flops(config: TrainConfig, model: ModelConfig, rows: int, kind: str = "") -> StepFlops:
    """Returns the FLOP of the step's program for ``rows`` packed rows, including recomputation in
    the backward pass and whole tiles of attention.

    Args:
      kind: kind of device, which determines the size of tiles.
    """
    kept = KEPT.get(config.loss.remat)
    again = 0 if kept is None else _recomputed_parameters(model, kept)
    repeats = kept is not None and "attended" not in kept
    pairs = rows * visited_pairs(config, kind)
    attention = 2 * _width(model) * pairs * (_FORWARD * (1 + repeats) + _BACKWARD)
    return StepFlops(rows * _row_products(config, model, again), attention)


def _row_products(config: TrainConfig, model: ModelConfig, again: int = 0) -> float:
    """Returns the FLOP of a row's products with parameters, forward and backward; ``again`` is the
    number of parameters whose products are recomputed."""
    # Frozen parameters have no gradient.
    passes, adapters = 2 if config.lora.rank else 3, 3 * _adapter_parameters(config, model)
    parameters = model.num_parameters(embeddings=False)
    backward = (passes - 1) * parameters + again + adapters
    layers = config.row_tokens * parameters + _learning_tokens(config) * backward
    head = passes * _targets(config.row_length, config.prediction_length)
    others = 0
    if config.objective == "drafter":  # logits of the mask and of its teacher, and one gradient
        head = 3 * config.prediction_length
        # One of the previous-token head's three matrices needs no gradient of its input.
        unit = (3 + 3 + 2) * model.hidden_size
        others = config.prediction_length * config.drafter.previous_rank * unit
    return 2 * (layers + head * _head_parameters(model) + others)


def _learning_tokens(config: TrainConfig) -> int:
    """Returns how many of a row's tokens have a backward pass; for a drafter, only its masks."""
    return config.prediction_length if config.objective == "drafter" else config.row_tokens


def visited_pairs(config: TrainConfig, kind: str = "", samples: int = 1) -> int:
    """Returns the number of pairs of a query and a key in the visited tiles of one row.

    Args:
      kind: kind of device.
      samples: number of equally long samples in the row. Tiles whose queries and keys belong to
        different samples are skipped by the splash kernel, and by others if the prediction stream
        is shorter than the row.
    """
    length, prediction = config.row_length, config.prediction_length
    splash = config.loss.attention == "splash"
    tile = tile_side(length, config.loss.tile, kind) if splash else min(DEFAULT_TILE, length)
    size = config.block_size if prediction else 1
    placed = config.leaves_blocks_out
    grid = TileGrid(padded(length, tile), padded(prediction, tile), tile, size, placed)
    tiles = grid.visible()
    if splash or placed:
        # Assumes evenly spread prediction blocks.
        place, within = np.divmod(np.arange(prediction), size)
        before = place * (length // size) // max(prediction // size, 1) * size
        index = np.arange(length)
        first, last = (x * samples // length for x in _ends(tile, index, before + within))
        query, key = tiles.T
        seen = (first[query] <= last[key]) & (first[key] <= last[query])
        # Leaves out tiles of the memory that begin after what their queries may see.
        reach = _ends(tile, index + 1, before)[1]
        tiles = tiles[seen & ((key * tile < reach[query]) | (key * tile >= grid.memory))]
    return len(tiles) * tile**2


def seen_pairs(config: TrainConfig, samples: int = 1) -> int:
    """Returns the number of visible pairs of query and key in a row of equally long samples."""
    bounds = np.arange(samples + 1) * config.row_length // samples
    total = 0
    for size in np.diff(bounds).tolist():
        triangle = size * (size + 1) // 2
        # The prediction stream sees earlier blocks of the memory, and its own block in order.
        total += triangle + triangle * config.prediction_length // config.row_length
    return total


def _ends(tile: int, *streams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first and the last number in each tile of the padded streams."""
    whole = [np.pad(x, (0, -len(x) % tile), mode="edge") for x in streams if len(x)]
    tiles = np.concatenate(whole).reshape(-1, tile)
    return tiles[:, 0], tiles[:, -1]


def _targets(row_length: int, prediction: int) -> float:
    """Returns how many of a row's tokens have a target, assuming that all of the prediction
    stream's tokens are trainable, half of them masked; the memory has the same targets."""
    return 1.5 * prediction if prediction else row_length


def _head_parameters(model: ModelConfig) -> int:
    return model.hidden_size * model.vocab_size


def _adapter_parameters(config: TrainConfig, model: ModelConfig) -> int:
    """Returns the number of the adapters' parameters of all layers together."""
    queries, keys = _projected_sizes(model)
    # One side of each matrix is the hidden size; these are the other sides.
    sides = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), model.intermediate_size)
    total = sum(model.hidden_size + sides[name] for name in {*config.lora.targets})
    return model.num_hidden_layers * config.lora.rank * total


def _recomputed_parameters(model: ModelConfig, kept: tuple[str, ...]) -> int:
    """Returns the number of parameters whose products the backward pass recomputes. A layer's last
    product, in the MLP, is never recomputed, since no gradient needs it."""
    d, mlp = model.hidden_size, model.hidden_size * model.intermediate_size
    queries, keys = _projected_sizes(model)
    sizes = {"projected": d * (queries + 2 * keys), "mixed": d * queries, "gate": mlp, "up": mlp}
    again = sum(size for name, size in sizes.items() if name not in kept)
    return model.num_hidden_layers * again


def _projected_sizes(model: ModelConfig) -> tuple[int, int]:
    """Returns the sizes of a layer's queries and keys, all heads together."""
    return model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim


def _width(model: ModelConfig) -> int:
    """Returns the width, over all layers, of the two products (scores, values) of a pair."""
    return _projected_sizes(model)[0] * model.num_hidden_layers


def peak_flops(device: jax.Device) -> float | None:
    """Returns the bfloat16 FLOP/s of a device; None if they are not known, as for a CPU."""
    kinds = [kind for kind in PEAK_FLOPS if device.device_kind.startswith(kind)]
    return PEAK_FLOPS[max(kinds, key=len)] if kinds else None


def describe_budget(state: TrainState, compiled: jax.stages.Compiled) -> str:
    """Returns a line about the memory of a device: parameters, optimizer, and compiler's peak."""
    device = jax.local_devices()[0]
    held = {"frozen": state.frozen, "parameters": state.parameters, "optimizer": state.optimizer}
    sizes = {name: local_bytes(tree) for name, tree in held.items() if tree is not None}
    peak = peak_bytes(compiled)
    sizes |= {"activations and the rest": max(peak - sum(sizes.values()), 0), "peak": peak}
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())
    limit = (device.memory_stats() or {}).get("bytes_limit")
    of = f" of {_gib(limit)}" if limit else ""
    return f"memory of a device{of}: {parts} (by the compiler)"


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the compiler's peak of a program's memory on one device, in bytes."""
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not count memory"
    # On a CPU the reported peak excludes temporaries.
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    on_cpu = jax.local_devices()[0].platform == "cpu"
    return held if on_cpu else memory.peak_memory_in_bytes or held


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
