"""The shortest time a program can take on a chip: each resource at its peak, all at once."""

from __future__ import annotations

import dataclasses

from wedlm_jax.aot.topology import Chip

ASSUMPTIONS = (
    "products at the chip's bfloat16 peak",
    "HBM at its full bandwidth, each fusion reading its operands and writing its result once",
    "every link between chips busy in both directions, with no latency and none in waiting",
    "the network between slices at each chip's share of its host's",
    "all of these at the same time, so that the slowest alone counts",
)
"""What `Roofline` takes for granted; no program gets there."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds in seconds, for one run of a program on each chip.

    Attributes:
      compute: matrix products.
      memory: HBM.
      network: links between the chips of a slice.
      slices: the network between slices.
    """

    compute: float
    memory: float
    network: float
    slices: float

    @property
    def seconds(self) -> float:
        return max(dataclasses.astuple(self))

    @property
    def bound(self) -> str:
        """The name of what takes longest."""
        parts = dataclasses.asdict(self)
        return max(parts, key=lambda name: parts[name])


def roofline(
    chip: Chip, *, flops: float, hbm_bytes: float, sent_bytes: float, slice_bytes: float = 0.0
) -> Roofline:
    """Bounds for what one chip does.

    Args:
      flops: of products.
      hbm_bytes: read and written.
      sent_bytes: that leave the chip for others of its slice.
      slice_bytes: that leave it for other slices.
    """
    return Roofline(
        compute=flops / chip.peak_flops,
        memory=hbm_bytes / chip.hbm_bandwidth,
        network=sent_bytes / chip.ici_bandwidth,
        slices=slice_bytes / chip.dcn_bandwidth,
    )
