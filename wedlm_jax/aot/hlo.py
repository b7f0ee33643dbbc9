"""Parses the text of a compiled program into computations and their instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
# A kernel's attributes may span several lines, some of which begin with a brace.
_END = re.compile(r'^\}(?:, execution_thread="\w+")?\s*$')
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z0-9]*\[([0-9,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEES = re.compile(
    r"\b(?:calls|body|to_apply|called_computations|branch_computations|(?:true|false)_computation)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# The layout of an array that is not in HBM names a memory space, such as S(1).
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """One array of a shape: its sizes and bytes, and whether it is in the chip's main memory."""

    sizes: tuple[int, ...]
    bytes: int
    in_hbm: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``name = shape opcode(operands), attributes``.

    Attributes:
      arrays: the arrays of its shape, with tuples flattened.
      operands: names of the operands, in order.
      number: the number of a parameter, or the value of an integer constant; None for others.
      attributes: the text after the operands.
      is_root: whether its computation returns it.
    """

    name: str
    opcode: str
    arrays: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    number: int | None
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """The total bytes of its arrays."""
        return sum(array.bytes for array in self.arrays)

    @property
    def callees(self) -> list[str]:
        """The computations that it runs, including all branches of a conditional."""
        found = _CALLEES.findall(self.attributes)
        return [name for names in found for name in re.findall(r"[\w.\-]+", names)]


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """The computations by name, and the name of the entry computation."""

    computations: Mapping[str, Computation]
    entry: str


def parse(hlo: str) -> HloProgram:
    """Parses ``compiled.as_text()``.

    Raises:
      ValueError: there is no entry computation in the text.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry = None
    current: dict[str, Instruction] | None = None
    for line in hlo.splitlines():
        if current is None:
            if found := _COMPUTATION.match(line):
                current = computations.setdefault(found.group(2), {})
                entry = found.group(2) if found.group(1) else entry
        elif _END.match(line):
            current = None
        elif found := _INSTRUCTION.match(line):
            root, name, shape, opcode, rest = found.groups()
            operands, attributes = _split_operands(rest)
            numbered = opcode in ("parameter", "constant") and operands.isdigit()
            current[name] = Instruction(
                name,
                opcode,
                _arrays(shape),
                tuple(_NAME.findall(operands)),
                int(operands) if numbered else None,
                attributes,
                bool(root),
            )
    if entry is None:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    return HloProgram(computations, entry)


def _arrays(shape: str) -> tuple[ArrayShape, ...]:
    arrays = []
    for kind, bits, listed, layout in _ARRAY.findall(shape):
        sizes = tuple(int(size) for size in listed.split(",") if size)
        each = 1 if kind == "pred" else max(int(bits or 32) // 8, 1)
        in_hbm = not (layout and _ELSEWHERE.search(layout))
        arrays.append(ArrayShape(sizes, each * math.prod(sizes), in_hbm))
    return tuple(arrays)


def _split_operands(rest: str) -> tuple[str, str]:
    """Splits the text after an opening parenthesis at the matching one."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def root_of(computation: Computation) -> Instruction | None:
    """Returns the instruction whose value a computation returns."""
    return next((instruction for instruction in computation.values() if instruction.is_root), None)


def trip_count(loop: Instruction, around: Computation, program: HloProgram) -> int | None:
    """Returns how often a while loop runs; None if that is unknown.

    The compiler for CPUs writes the count next to the loop. For TPUs it is derived: the condition
    compares a counter, which counts up from a constant in ``around``, with another constant.
    """
    if found := _TRIP_COUNT.search(loop.attributes):
        return int(found.group(1))
    found = _CONDITION.search(loop.attributes)
    condition = program.computations.get(found.group(1), {}) if found else {}
    root = root_of(condition)
    if root is None or "direction=LT" not in root.attributes:
        return None
    sides = [condition[name] for name in root.operands if name in condition]
    limits = [instruction.number for instruction in sides if instruction.opcode == "constant"]
    counters = [instruction for instruction in sides if instruction.opcode == "get-tuple-element"]
    if len(limits) != 1 or limits[0] is None or len(counters) != 1:
        return None
    return limits[0] - _first_value(loop, counters[0], around)


def _first_value(loop: Instruction, counter: Instruction, around: Computation) -> int:
    """Returns the initial value of a loop's counter; 0 if that is not visible."""
    index, state = _INDEX.search(counter.attributes), around.get(loop.operands[0])
    if index is None or state is None or state.opcode != "tuple":
        return 0
    first = around.get(state.operands[int(index.group(1))])
    while first is not None and first.opcode in ("copy", "bitcast") and first.operands:
        first = around.get(first.operands[0])
    return first.number or 0 if first is not None and first.opcode == "constant" else 0
