"""Computes the costs of a compiled program from its HLO text.

XLA's own cost analysis counts the body of a loop once. Here each computation's cost is multiplied
by the trip count of the loop that calls it.

Bytes are those through a chip's main memory. A fusion reads its operands and writes its result,
each once; what it computes in between stays on the chip. If it only slices an operand, the slice
counts; if it only updates its result in place, the update counts. A kernel counts in the same way,
although it may read data repeatedly, unless it declares how many bytes it reads and writes. Arrays
in the chip's vector memory do not count, nor does what a fusion passes on from a collective in
progress, whose bytes are counted with the collective.
"""

from __future__ import annotations

import dataclasses
import math
import re

from wedlm_jax.aot.hlo import Computation, HloProgram, Instruction, parse, root_of, trip_count

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([0-9,]*)\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# The computations that these call only combine two numbers.
_SCALAR_CALLERS = (*COLLECTIVES, "reduce", "scatter", "sort", "reduce-window", "map")
_LISTED_GROUPS = re.compile(r"\breplica_groups=\{\{([0-9,]*)\}")
_IOTA_GROUPS = re.compile(r"\breplica_groups=\[(?:[0-9,]+,)?([0-9]+)\]<=\[")
_MESH_GROUPS = re.compile(r"\breplica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")

# These move nothing, or are counted in the computations that they call.
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|iota|partition-id|replica-id|while|call|"
    "conditional|async-start|async-update|send|recv|after-all|add-dependency|opt-barrier|.*-done"
)
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "copy", "reshape", "convert")
_PASSED_ON = ("bitcast", "get-tuple-element", "dynamic-slice")
_KERNEL_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')


@dataclasses.dataclass
class ProgramCost:
    """Totals of one run of a program, per device.

    Attributes:
      dot_flops: FLOP of matrix products; a multiply-add is two. Products that TPU programs write as
        convolutions, and those inside kernels, are not counted.
      hbm_bytes: bytes read and written in main memory.
      collective_bytes: by kind, the bytes of results; collectives between slices are other kinds.
      collective_count: by kind of collective, how often it runs.
      sent_bytes: bytes that leave a device in collectives within a slice, each run as a ring.
      slice_bytes: bytes that leave a device in collectives between slices.
    """

    dot_flops: int = 0
    hbm_bytes: int = 0
    collective_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    collective_count: dict[str, int] = dataclasses.field(default_factory=dict)
    sent_bytes: float = 0.0
    slice_bytes: float = 0.0


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


def hbm_bytes(instruction: Instruction, computation: Computation, program: HloProgram) -> int:
    """Returns the bytes that one run of an instruction reads and writes: those of a fusion's
    computation, but not of other computations that it calls."""
    if _FREE.fullmatch(instruction.opcode):
        return 0
    if instruction.opcode == "fusion":
        body = program.computations[instruction.callees[0]]
        read = sum(
            min(_in_hbm(computation.get(name)), _read(place, body, program))
            for place, name in enumerate(instruction.operands)
        )
        return read + _written(instruction, body)
    if instruction.opcode == "custom-call" and (
        declared := _KERNEL_BYTES.search(instruction.attributes)
    ):
        return int(declared.group(1))
    if instruction.opcode in _SLICES:
        return 2 * _in_hbm(instruction)
    if instruction.opcode == "slice-start":  # yields its operand, the slice, and a flag
        whole, part = instruction.arrays[:2]
        return part.bytes * (whole.in_hbm + part.in_hbm)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _in_hbm(computation.get(instruction.operands[1]))
    read = sum(_in_hbm(computation.get(name)) for name in instruction.operands)
    # The result of a start includes its operands, some of it in other memory.
    return read + max(
        _in_hbm(instruction) - (read if instruction.opcode.endswith("-start") else 0), 0
    )


def _in_hbm(instruction: Instruction | None) -> int:
    """Returns how many bytes of an instruction's result are in main memory."""
    return sum(array.bytes for array in instruction.arrays if array.in_hbm) if instruction else 0


_ALL = 1 << 62
"""Stands for the bytes of an operand that is read, or a result that is written, as a whole."""


def _read(place: int, body: Computation, program: HloProgram) -> int:
    """Returns how many bytes of its operand number ``place`` a fusion reads."""
    inputs = (instruction for instruction in body.values() if instruction.opcode == "parameter")
    parameter = next((instruction for instruction in inputs if instruction.number == place), None)
    return _ALL if parameter is None else _used(parameter, body, program)


def _used(instruction: Instruction, body: Computation, program: HloProgram) -> int:
    """Returns how many bytes of one instruction's result the others of a fusion use."""
    uses = [
        (user, place)
        for user in body.values()
        for place, name in enumerate(user.operands)
        if name == instruction.name
    ]
    total = 0
    for user, place in uses:
        if user.opcode in _VIEWS and not user.is_root:
            total += _used(user, body, program)
        elif user.opcode == "fusion":
            total += _read(place, program.computations[user.callees[0]], program)
        elif user.opcode in _SLICES and place == 0:
            total += user.bytes
        elif not (_is_under_way(user) or (user.opcode == "dynamic-update-slice" and place == 0)):
            return _ALL
    return total


def _is_under_way(instruction: Instruction) -> bool:
    """Returns whether an instruction is a collective in progress, or passes one on."""
    asynchronous = (
        instruction.opcode == "custom-call" and "AsyncCollective" in instruction.attributes
    )
    return instruction.opcode in COLLECTIVES or asynchronous


def _written(instruction: Instruction, body: Computation) -> int:
    """Returns the bytes that a fusion writes; for an update in place, those of the update."""
    root = root_of(body)
    if root is None or _is_under_way(root):
        return 0
    parts = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(parts) != len(instruction.arrays):
        return _in_hbm(instruction)
    return sum(
        min(array.bytes, _written_by(part, body))
        for part, array in zip(parts, instruction.arrays, strict=True)
        if array.in_hbm
    )


def _written_by(part: Instruction, body: Computation) -> int:
    while part.opcode in _PASSED_ON and part.operands[0] in body:
        part = body[part.operands[0]]
    if _is_under_way(part):
        return 0
    return body[part.operands[1]].bytes if part.opcode == "dynamic-update-slice" else _ALL
