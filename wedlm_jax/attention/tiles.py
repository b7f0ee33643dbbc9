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
"""By a device's kind, the side that takes the least time for rows of 4,096, see `grid_seconds`."""

UNKNOWN = 512
"""Of devices that `TILES` does not name."""


def tile_side(length: int, given: int = 0, kind: str | None = None) -> int:
    """Returns the side of the kernel's tiles for streams of ``length`` tokens: no larger than the
    stream, in whole vectors.

    Args:
      given: what the recipe says; 0: by the device.
      kind: of the device; by default that of the current mesh.
    """
    side = given or TILES.get(_kind_of_mesh() if kind is None else kind, UNKNOWN)
    return min(side, -(-length // LANES) * LANES)


def _kind_of_mesh() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind
