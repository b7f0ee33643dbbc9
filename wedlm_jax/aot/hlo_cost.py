"""What a compiled program will do, read from its HLO text, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once. Here each computation's cost is
multiplied by the trip count of the loop that calls it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

from wedlm_jax.aot.hlo_groups import group_size
from wedlm_jax.aot.hlo_text import Computation, HloProgram, Instruction, parse, trip_count
from wedlm_jax.aot.hlo_traffic import COLLECTIVES, hbm_bytes

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([0-9,]*)\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# What these call combines two numbers.
_SCALAR_CALLERS = (*COLLECTIVES, "reduce", "scatter", "sort", "reduce-window", "map")


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Totals of one run of a program, per device.

    Attributes:
      dot_flops: of matrix products; a multiply-add is two. Programs for TPUs write them as
        convolutions, which are not counted.
      hbm_bytes: read and written in main memory, as `wedlm_jax.aot.hlo_traffic` counts them.
      collective_bytes: by kind, the bytes that its results take; collectives between slices
        are kinds of their own.
      collective_count: by kind, how often it runs.
      sent_bytes: that leave a device in collectives within a slice, each done as a ring.
      slice_bytes: likewise, in collectives between slices.
      unknown_loops: loops whose trip count is not known, counted once.
    """

    dot_flops: int
    hbm_bytes: int
    collective_bytes: dict[str, int]
    collective_count: dict[str, int]
    sent_bytes: int
    slice_bytes: int
    unknown_loops: int


def program_cost(
    hlo: str, *, devices: int = 0, slices: int = 1, branch: int | None = None
) -> ProgramCost:
    """Costs of the entry computation of ``compiled.as_text()``.

    Matrix products within a custom call (a Pallas kernel) are not seen.

    Args:
      hlo: the text.
      devices: of a slice, for collectives that name no groups.
      slices: that run the program together.
      branch: which branch of a conditional counts (the last, where there are fewer); all of
        them by default, because which one runs is not known.

    Raises:
      ValueError: there is no entry computation in the text.
    """
    program = parse(hlo)
    count = _Count(program, devices, slices, branch)
    count.add(program.entry, 1, fused=False, seen=set())
    return ProgramCost(
        count.flops,
        count.memory,
        dict(count.moved),
        dict(count.runs),
        int(count.sent),
        int(count.slice_sent),
        count.unknown_loops,
    )


class _Count:
    """Sums over the computations of a program."""

    def __init__(self, program: HloProgram, devices: int, slices: int, branch: int | None):
        self._program, self._devices, self._slices = program, devices, slices
        self._branch = branch
        self.flops = self.memory = self.unknown_loops = 0
        self.sent = self.slice_sent = 0.0
        self.moved: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()

    def add(self, name: str, times: int, *, fused: bool, seen: set[str]) -> None:
        """Adds ``times`` runs of a computation. Within a fusion nothing goes through HBM;
        ``seen`` are the channels of collectives that are under way."""
        computations = self._program.computations
        computation = computations[name]
        for own in computation.values():
            kind = own.opcode.removesuffix("-start")
            if own.opcode == "dot":
                self.flops += times * _dot_flops(own, computation)
            if kind in COLLECTIVES:
                # In a fusion named so, each device keeps its share of the sum only.
                scattered = kind == "all-reduce" and name.startswith("all-reduce-scatter")
                kind = "reduce-scatter" if scattered else kind
                self._add_collective(own, kind, computation, times, fused=fused, seen=seen)
            elif own.opcode == "send":
                self._add_transfer(own, computation, times)
            if not fused:
                self.memory += times * hbm_bytes(own, computation, self._program)
            if kind in _SCALAR_CALLERS or own.opcode in ("async-update", "async-done"):
                continue
            trips = trip_count(own, computation, self._program) if own.opcode == "while" else 1
            self.unknown_loops += trips is None
            inside = fused or own.opcode == "fusion"
            for callee in [*own.callees, *self._chosen(own.branches)]:
                if callee in computations:
                    under_way = seen if inside else set()
                    self.add(
                        callee,
                        times * (1 if trips is None else trips),
                        fused=inside,
                        seen=under_way,
                    )

    def _chosen(self, names: list[str]) -> list[str]:
        if self._branch is None or not names:
            return names
        return [names[min(self._branch, len(names) - 1)]]

    def _add_collective(
        self,
        own: Instruction,
        kind: str,
        computation: Computation,
        times: int,
        *,
        fused: bool,
        seen: set[str],
    ) -> None:
        # TPUs take a collective through several fusions that compute meanwhile.
        channel = _CHANNEL.search(own.attributes)
        if fused and channel:
            if channel.group(1) in seen:
                return
            seen.add(channel.group(1))
        members = group_size(own.attributes, self._devices)
        share = (members - 1) / members if members else 1.0
        read = [
            array.bytes
            for name in own.operands
            if name in computation
            for array in computation[name].arrays
        ]
        result = sum(array.bytes for array in own.arrays)
        if own.opcode.endswith("-start"):
            # What a start yields holds its operands, too.
            result = max(result - sum(read), 0) or result
        if kind == "reduce-scatter" and own.opcode.startswith("all-reduce"):
            result = result // members if members else result
        sent = {
            "all-gather": share * result,
            "all-reduce": 2 * share * result,
            "reduce-scatter": share * sum(read),
            "all-to-all": share * result,
            "collective-permute": result,
        }[kind]
        self.runs[kind] += times
        self.moved[kind] += times * result
        self.sent += times * sent
        if fused:
            self.memory += times * (sum(read) + result)

    def _add_transfer(self, own: Instruction, computation: Computation, times: int) -> None:
        """A collective between slices: each device hands its share to its host's network."""
        found = _BETWEEN_SLICES.search(own.attributes)
        if not found:
            return
        size = sum(array.bytes for array in computation[own.operands[0]].arrays)
        kind = f"{found.group(1).lower().replace('_', '-')} between slices"
        ring = 2 * (self._slices - 1) / self._slices if "ALL_REDUCE" in found.group(1) else 1
        self.runs[kind] += times
        self.moved[kind] += times * size
        self.slice_sent += times * ring * size


def _dot_flops(own: Instruction, computation: Computation) -> int:
    contracted = _CONTRACTED.search(own.attributes)
    if contracted is None or not own.operands:
        return 0
    left = computation[own.operands[0]].arrays[0].sizes
    width = math.prod(left[int(axis)] for axis in contracted.group(1).split(",") if axis)
    return 2 * math.prod(own.arrays[0].sizes) * width
