"""Computes the costs of a compiled program from its HLO text.

XLA's own cost analysis counts the body of a loop once. Here each computation's cost is multiplied
by the trip count of the loop that calls it.
"""

from __future__ import annotations

import dataclasses
import math
import re

from wedlm_jax.aot.hlo import Computation, HloProgram, Instruction, parse, trip_count
from wedlm_jax.aot.traffic import COLLECTIVES, hbm_bytes

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([0-9,]*)\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# The computations that these call only combine two numbers.
_SCALAR_CALLERS = (*COLLECTIVES, "reduce", "scatter", "sort", "reduce-window", "map")
_LISTED_GROUPS = re.compile(r"\breplica_groups=\{\{([0-9,]*)\}")
_IOTA_GROUPS = re.compile(r"\breplica_groups=\[(?:[0-9,]+,)?([0-9]+)\]<=\[")
_MESH_GROUPS = re.compile(r"\breplica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")


@dataclasses.dataclass
class ProgramCost:
    """Totals of one run of a program, per device.

    Attributes:
      dot_flops: FLOP of matrix products; a multiply-add is two. Products that TPU programs write as
        convolutions, and those inside kernels, are not counted.
      hbm_bytes: bytes read and written in main memory, as `wedlm_jax.aot.traffic` counts them.
      collective_bytes: by kind, the bytes of results; collectives between slices are other kinds.
      collective_count: by kind of collective, how often it runs.
      sent_bytes: bytes that leave a device in collectives within a slice, each run as a ring.
      slice_bytes: bytes that leave a device in collectives between slices.
      unknown_loops: how many loops have an unknown trip count.
    """

    dot_flops: int = 0
    hbm_bytes: int = 0
    collective_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    collective_count: dict[str, int] = dataclasses.field(default_factory=dict)
    sent_bytes: float = 0.0
    slice_bytes: float = 0.0
    unknown_loops: int = 0


def program_cost(
    hlo: str, *, devices: int = 0, slices: int = 1, unknown_trips: int = 1
) -> ProgramCost:
    """Returns the costs of the entry computation of ``compiled.as_text()``; all branches count.

    Args:
      hlo: the text.
      devices: how many devices a slice has, for collectives that name no groups.
      slices: how many slices run the program together.
      unknown_trips: the trip count to assume for loops where it is unknown.

    Raises:
      ValueError: there is no entry computation in the text.
    """
    program = parse(hlo)
    counter = _Counter(program, devices, slices, unknown_trips)
    counter.add(program.entry, 1, fused=False, seen=set())
    cost = counter.cost
    cost.sent_bytes, cost.slice_bytes = int(cost.sent_bytes), int(cost.slice_bytes)
    return cost


@dataclasses.dataclass
class _Counter:
    """Sums over the computations of a program."""

    program: HloProgram
    devices: int
    slices: int
    unknown_trips: int
    cost: ProgramCost = dataclasses.field(default_factory=ProgramCost)

    def add(self, name: str, times: int, *, fused: bool, seen: set[str]) -> None:
        """Adds ``times`` runs of a computation. Within a fusion nothing goes through HBM; ``seen``
        has the channels of collectives in progress."""
        computation = self.program.computations[name]
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if instruction.opcode == "dot":
                self.cost.dot_flops += times * _dot_flops(instruction, computation)
            elif instruction.opcode == "send":
                self._add_transfer(instruction, computation, times)
            elif kind in COLLECTIVES and not (fused and _is_seen(instruction, seen)):
                # In a fusion with this name each device keeps only its share of the sum.
                scattered = kind == "all-reduce" and name.startswith("all-reduce-scatter")
                kind = "reduce-scatter" if scattered else kind
                self._add_collective(instruction, kind, computation, times, fused=fused)
            if not fused:
                self.cost.hbm_bytes += times * hbm_bytes(instruction, computation, self.program)
            if kind in _SCALAR_CALLERS or instruction.opcode in ("async-update", "async-done"):
                continue
            trips = (
                trip_count(instruction, computation, self.program)
                if instruction.opcode == "while"
                else 1
            )
            self.cost.unknown_loops += trips is None
            inside = fused or instruction.opcode == "fusion"
            for callee in instruction.callees:
                if callee in self.program.computations:
                    runs = times * (self.unknown_trips if trips is None else trips)
                    self.add(callee, runs, fused=inside, seen=seen if inside else set())

    def _add_collective(
        self,
        instruction: Instruction,
        kind: str,
        computation: Computation,
        times: int,
        *,
        fused: bool,
    ) -> None:
        members = group_size(instruction.attributes, self.devices)
        share = (members - 1) / members if members else 1.0
        read = sum(computation[name].bytes for name in instruction.operands if name in computation)
        result = instruction.bytes
        if instruction.opcode.endswith("-start"):
            # The result of a start includes its operands.
            result = max(result - read, 0) or result
        if kind == "reduce-scatter" and instruction.opcode.startswith("all-reduce"):
            result = result // members if members else result
        sent = {
            "all-gather": share * result,
            "all-reduce": 2 * share * result,
            "reduce-scatter": share * read,
            "all-to-all": share * result,
            "collective-permute": result,
        }[kind]
        self._count(kind, times, result)
        self.cost.sent_bytes += times * sent
        if fused:
            self.cost.hbm_bytes += times * (read + result)

    def _add_transfer(self, instruction: Instruction, computation: Computation, times: int) -> None:
        """Counts a collective between slices, in which each device sends its share."""
        if found := _BETWEEN_SLICES.search(instruction.attributes):
            size = computation[instruction.operands[0]].bytes
            kind = f"{found.group(1).lower().replace('_', '-')} between slices"
            ring = 2 * (self.slices - 1) / self.slices if "ALL_REDUCE" in found.group(1) else 1
            self._count(kind, times, size)
            self.cost.slice_bytes += times * ring * size

    def _count(self, kind: str, times: int, size: int) -> None:
        count, moved = self.cost.collective_count, self.cost.collective_bytes
        count[kind] = count.get(kind, 0) + times
        moved[kind] = moved.get(kind, 0) + times * size


def _is_seen(instruction: Instruction, seen: set[str]) -> bool:
    """Returns whether this collective is counted already: a TPU may spread a collective over
    several fusions to overlap it with computation."""
    channel = _CHANNEL.search(instruction.attributes)
    known = channel is not None and channel.group(1) in seen
    seen.update(channel.groups() if channel else ())
    return known


def _dot_flops(instruction: Instruction, computation: Computation) -> int:
    contracted = _CONTRACTED.search(instruction.attributes)
    if contracted is None or not instruction.operands:
        return 0
    left = computation[instruction.operands[0]].arrays[0].sizes
    width = math.prod(left[int(axis)] for axis in contracted.group(1).split(",") if axis)
    return 2 * math.prod(instruction.arrays[0].sizes) * width


def group_size(attributes: str, devices: int) -> int:
    """Returns how many devices each group of a collective has, going by the first one; ``devices``
    if the text has no groups, or empty ones."""
    if found := _LISTED_GROUPS.search(attributes):
        return len(found.group(1).split(","))
    if found := _IOTA_GROUPS.search(attributes):
        return int(found.group(1))
    if found := _MESH_GROUPS.search(attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found.group(2)))
    return devices
