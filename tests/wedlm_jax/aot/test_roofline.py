"""A program takes as long as its slowest resource."""

from __future__ import annotations

import pytest

from wedlm_jax.aot.roofline import Roofline, roofline
from wedlm_jax.aot.topology import Chip

CHIP = Chip(hbm_bytes=1, peak_flops=100.0, hbm_bandwidth=10.0, ici_bandwidth=5.0, dcn_bandwidth=1.0)


def test_each_resource_has_its_own_time() -> None:
    bound = roofline(CHIP, flops=200, hbm_bytes=30, sent_bytes=5, slice_bytes=4)
    assert bound == Roofline(compute=2.0, memory=3.0, network=1.0, slices=4.0)


@pytest.mark.parametrize(
    ("bound", "slowest"),
    [
        (Roofline(2.0, 1.0, 0.0, 0.0), "compute"),
        (Roofline(2.0, 3.0, 0.0, 0.0), "memory"),
        (Roofline(0.0, 1.0, 4.0, 0.0), "network"),
        (Roofline(0.0, 1.0, 4.0, 5.0), "slices"),
    ],
)
def test_the_slowest_alone_counts(bound: Roofline, slowest: str) -> None:
    assert bound.bound == slowest
    assert bound.seconds == getattr(bound, slowest)
