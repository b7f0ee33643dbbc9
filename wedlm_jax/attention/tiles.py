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
"""By a device's kind. Chosen with `grid_seconds` for rows of 4,096 tokens, from the sides that the
compiler fits into the chip's vector memory."""

STEP_SECONDS = 0.35e-6
"""Of one place in a kernel's grid, beside its products: as the documentation of Pallas gives it."""

UNKNOWN = 512
"""Of devices that `TILES` does not name."""


def tile_side(length: int, given: int = 0, kind: str | None = None) -> int:
    """Returns the side of the kernel's tiles for streams of ``length`` tokens: no larger than the
    stream, in whole vectors.

    Args:
      given: what the recipe says; 0: by the device.
      kind: kind of the device; by default that of the current mesh.
    """
    side = given or TILES.get(_kind_of_mesh() if kind is None else kind, UNKNOWN)
    return min(side, -(-length // LANES) * LANES)


def _kind_of_mesh() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def grid_seconds(length: int, side: int, peak_flops: float, head_dim: int = 128) -> float:
    """Estimates forward and backward pass of one head over one dual-stream row, one sample long.

    Smaller tiles compute fewer pairs that are not seen, larger ones have fewer places in the grid.
    The forward pass goes through the places of the fullest query tile for each; the backward pass
    through all.

    Args:
      length: L of one stream.
      side: side of a tile.
      peak_flops: peak flops of the chip.
      head_dim: size of a head.
    """
    count = -(-length // side)
    visited = count * (count + 1) + count
    places = 2 * count * (count + 1) + (2 * count) ** 2
    products = 2 * head_dim * side**2 * (2 + 5) * visited
    return products / peak_flops + places * STEP_SECONDS
