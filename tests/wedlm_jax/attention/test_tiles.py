"""Sides of the kernel's tiles: by chip, by recipe, and never larger than the row."""

import pytest

from wedlm_jax.aot.topology import CHIPS
from wedlm_jax.attention.tiles import TILES, UNKNOWN, grid_seconds, tile_side


@pytest.mark.parametrize(
    ("length", "given", "kind", "side"),
    [
        (4096, 0, "TPU v5", TILES["TPU v5"]),
        (4096, 0, "TPU of tomorrow", UNKNOWN),
        (4096, 256, "TPU v5", 256),
        (200, 0, "TPU v5", 256),
        (200, 0, None, 256),
        (8192, 0, None, UNKNOWN),
    ],
)
def test_the_side_is_the_recipes_or_the_chips(length, given, kind, side):
    assert tile_side(length, given, kind) == side


@pytest.mark.parametrize(
    ("kind", "chip"), [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e")]
)
def test_the_chips_side_takes_the_least_time(kind, chip):
    sides = (256, 512, 1024)
    times = {side: grid_seconds(4096, side, CHIPS[chip].peak_flops) for side in sides}
    assert min(times, key=times.__getitem__) == TILES[kind]
