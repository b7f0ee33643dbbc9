"""The side of the splash kernel's tiles on each TPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax

LANES = 128
"""Tiles are multiples of the vector width."""

TILES: Mapping[str, int] = MappingProxyType(
    {"TPU v5 lite": 1024, "TPU v5": 1024, "TPU v6 lite": 1024}
)
"""The sides by kind of device. Chosen with `grid_seconds` for rows of 4,096 tokens, among the sides
that fit into the chip's vector memory."""

STEP_SECONDS = 0.35e-6
"""The overhead of one step of a kernel's grid, from the documentation of Pallas."""

UNKNOWN = 512
"""The side for devices that are not in `TILES`."""


def tile_side(length: int, given: int = 0, kind: str | None = None) -> int:
    """Returns the side of the kernel's tiles for streams of ``length`` tokens: no larger than the
    stream, in whole vectors.

    Args:
      given: the recipe's value; 0 to choose by the device.
      kind: kind of the device; by default that of the current mesh.
    """
    side = given or TILES.get(_kind_of_mesh() if kind is None else kind, UNKNOWN)
    return min(side, -(-length // LANES) * LANES)


def _kind_of_mesh() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def grid_seconds(length: int, side: int, peak_flops: float, head_dim: int = 128) -> float:
    """Estimates the time of the forward and backward pass of one head over a row of one sample.

    Smaller tiles compute fewer invisible pairs; larger ones need fewer steps of the grid. The
    forward pass takes as many steps for every query tile as for the fullest; the backward pass
    takes all steps.

    Args:
      length: L of one stream.
      side: side of a tile.
      peak_flops: peak FLOP/s of the chip.
      head_dim: size of a head.
    """
    count = -(-length // side)
    visited = count * (count + 1) + count
    places = 2 * count * (count + 1) + (2 * count) ** 2
    products = 2 * head_dim * side**2 * (2 + 5) * visited
    return products / peak_flops + places * STEP_SECONDS
