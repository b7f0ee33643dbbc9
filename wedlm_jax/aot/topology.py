"""Compiles for TPU pods without TPUs, and holds the published figures of their chips.

`libtpu` compiles for a topology on any machine (`pip install "wedlm-jax[tpu]"`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from wedlm_jax.errors import InputError, require_extra
from wedlm_jax.host.signals import compiled


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip.

    Attributes:
      hbm_bytes: memory capacity.
      peak_flops: bfloat16 FLOP/s.
      hbm_bandwidth: bytes/s.
      ici_bandwidth: bytes/s over all links between chips of a slice, one way.
      dcn_bandwidth: the chip's share of its host's bandwidth in the data-centre network between
        slices, in bytes/s, one way.
    """

    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float

    def bounds(
        self, *, flops: float, hbm_bytes: float, sent_bytes: float, slice_bytes: float = 0.0
    ) -> Roofline:
        """Returns the shortest times for an amount of work on the chip: FLOP of products, and bytes
        read and written, sent to other chips of its slice, and sent to other slices."""
        return Roofline(
            compute=flops / self.peak_flops,
            memory=hbm_bytes / self.hbm_bandwidth,
            network=sent_bytes / self.ici_bandwidth,
            slices=slice_bytes / self.dcn_bandwidth,
        )


REACHED_BY_PRODUCTS, REACHED_BY_ATTENTION = 0.6, 0.4
EXPECTED_ASSUMPTIONS = (
    f"products at {REACHED_BY_PRODUCTS} of the peak and attention's at {REACHED_BY_ATTENTION}, one "
    "after the other, everything else hidden behind them unless it takes longer"
)
"""The assumptions of an expected time: rules of thumb that were not measured on a chip."""

ASSUMPTIONS = (
    "products at the chip's bfloat16 peak; HBM at its full bandwidth, each fusion reading its "
    "operands and writing its result once; every link between chips busy in both directions, with "
    "no latency and none in waiting; the network between slices at each chip's share of its "
    "host's; all of these at the same time, so that the slowest alone counts"
)
"""The assumptions of `Roofline`; no program reaches these times."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds in seconds for one run of a program, for each resource of a chip at its peak.

    Attributes:
      compute: time of matrix products.
      memory: time of HBM.
      network: time of the links between the chips of a slice.
      slices: time of the network between slices.
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
        """The name of the resource that takes longest."""
        parts = dataclasses.asdict(self)
        return max(parts, key=lambda name: parts[name])


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": Chip(16 * 2**30, 197e12, 819e9, 200e9, 3.125e9),
        "v5p": Chip(95 * 2**30, 459e12, 2765e9, 600e9, 6.25e9),
        "v6e": Chip(32 * 2**30, 918e12, 1638e9, 400e9, 12.5e9),
    }
)
EXAMPLE = "v5p:4x4x4"

_OVERLAP = {
    f"xla_tpu_enable_async_collective_fusion{what}": "true"
    for what in ("", "_fuse_all_reduce", "_multiple_steps")
}
_OVERLAP |= {"xla_tpu_overlap_compute_collective_tc": "true", "xla_enable_async_all_gather": "true"}
_FUSED_GATHERS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
# Newer compilers refuse gathers in fusions for v5p and v6e: "incorrect results".
COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "TPU v5 lite": {**_OVERLAP, _FUSED_GATHERS: "true"},
        "TPU v5": {**_OVERLAP, _FUSED_GATHERS: "false"},
        "TPU v6 lite": {**_OVERLAP, _FUSED_GATHERS: "false"},
    }
)
"""XLA's flags for a training step, by kind of device: gathers of weights and sums of gradients
overlap with products. They are passed with the program, so that none depends on an environment
variable."""


def compiler_options(kind: str) -> dict[str, str | bool]:
    """Returns the flags for devices of this kind; none unless they are TPUs."""
    return dict(COMPILER_OPTIONS.get(kind, {}))


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      name: the name as given, such as ``v5p:4x4x4``, or ``v5p:8x8x8*2`` for two slices.
      chip: figures of each device.
      devices: the compiler's devices, in the order of the topology.
      slices: the number of slices, which are connected by a data-centre network only.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]
    slices: int = 1


def parse_topology(name: str) -> tuple[str, tuple[int, ...], int]:
    """Splits ``v5p:8x8x8*2`` into ("v5p", (8, 8, 8), 2).

    Raises:
      InputError: the name is not of this form, or the generation is unknown.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:\*(\d+))?", name)
    if not found or found.group(1) not in CHIPS:
        raise InputError(
            f"topology {name!r}: expected a chip ({', '.join(CHIPS)}) and its shape, as in "
            f"{EXAMPLE}, followed by *N for N slices"
        )
    shape = tuple(int(size) for size in found.group(2).split("x"))
    return found.group(1), shape, int(found.group(3) or 1)


def describe_topology(name: str) -> Topology:
    """Returns the compiler's devices of a topology; no TPU is touched.

    Raises:
      InputError: a malformed name, no libtpu, or a shape that does not exist for the chip.
    """
    kind, shape, slices = parse_topology(name)
    if "TPU_LIBRARY_PATH" not in os.environ:
        require_extra("compiling for TPUs", "tpu", "libtpu")
    # libtpu otherwise asks a metadata server, which only TPU machines have.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{kind}-{math.prod(shape)}")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if math.prod(shape) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]  # else a topology has whole hosts
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{kind}:{'x'.join(map(str, shape))}", **options
        )
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"topology {name!r}: {reason[:200]}") from None
    return Topology(name, CHIPS[kind], tuple(described.devices), slices)


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled for a topology.

    Attributes:
      text: its HLO.
      peak_bytes, temporary_bytes: the compiler's count of HBM bytes on one device.
      seconds: how long compiling took.
    """

    text: str
    peak_bytes: int
    temporary_bytes: int
    seconds: float


def compile_for(
    topology: Topology,
    mesh: Mesh,
    lower: Callable[[], jax.stages.Lowered],
    what: str,
    options: Mapping[str, str | bool] = MappingProxyType({}),
) -> CompiledProgram:
    """Compiles a program, ``what`` in messages, that ``lower`` lowers under the mesh, with these of
    XLA's flags.

    Raises:
      InputError: it does not fit into the chip's memory.
    """
    started = time.perf_counter()
    try:
        with jax.set_mesh(mesh), jax.default_device(topology.devices[0]):
            lowered = lower()
        done = compiled(lambda: lowered.compile(compiler_options=dict(options) or None))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = next((line for line in str(error).splitlines() if "hbm" in line.lower()), "")
        raise InputError(f"{topology.name}: the {what} does not fit: {reason.strip()}") from None
    memory = done.memory_analysis()
    assert memory is not None, "this backend does not count memory"
    return CompiledProgram(
        done.as_text() or "",
        memory.peak_memory_in_bytes,
        memory.temp_size_in_bytes,
        time.perf_counter() - started,
    )
