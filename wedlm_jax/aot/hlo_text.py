"""The text of a compiled program, taken apart: computations of instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLS = re.compile(r"\b(?:calls|body|to_apply|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"\b(?:branch_computations=\{([^}]*)\}|"
    r"true_computation=(%?[\w.\-]+), false_computation=(%?[\w.\-]+))"
)
# A layout that names a memory space, such as S(1), is of an array that is not in HBM.
_ELSEWHERE = re.compile(r"S\([1-9]\d*\)")

_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """One array of a shape: dtype, sizes, and whether it lies in the chip's main memory."""

    dtype: str
    sizes: tuple[int, ...]
    in_hbm: bool

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * _BYTES.get(self.dtype, 4)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``name = shape opcode(operands), attributes``.

    Attributes:
      shape: as written; see `arrays`.
      operands: names, in order.
      number: which parameter this is, or what an integer constant is; None for others.
      attributes: the text behind the operands.
      is_root: whether it is what its computation returns.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    number: int | None
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[ArrayShape, ...]:
        """The arrays of its shape, tuples flattened."""
        return arrays_of(self.shape)

    @property
    def callees(self) -> list[str]:
        """Computations that it runs, branches apart."""
        return _CALLS.findall(self.attributes)

    @property
    def branches(self) -> list[str]:
        """Computations of which it runs one; that of False or 0 first."""
        names: list[str] = []
        for listed, if_true, if_false in _BRANCHES.findall(self.attributes):
            if listed:
                names += [name.strip().lstrip("%") for name in listed.split(",")]
            else:
                names += [if_false.lstrip("%"), if_true.lstrip("%")]
        return names


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """Computations by name, and the name of the one that runs first."""

    computations: Mapping[str, Computation]
    entry: str


def parse(hlo: str) -> HloProgram:
    """The program of ``compiled.as_text()``.

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
        elif line.rstrip() == "}":  # a kernel's attributes go over lines that begin so, too
            current = None
        elif found := _INSTRUCTION.match(line):
            root, name, shape, opcode, rest = found.groups()
            operands, attributes = _split_operands(rest)
            numbered = opcode in ("parameter", "constant") and operands.isdigit()
            number = int(operands) if numbered else None
            names = tuple(_OPERAND.findall(operands))
            current[name] = Instruction(name, shape, opcode, names, number, attributes, bool(root))
    if entry is None:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    return HloProgram(computations, entry)


def trip_count(loop: Instruction, around: Computation, program: HloProgram) -> int | None:
    """How often a while loop runs, where that is known.

    Compilers write it beside the loop, or leave it to be seen: the condition compares a counter,
    which goes up by one from a constant of the computation ``around``, with a constant.
    """
    if found := _TRIP_COUNT.search(loop.attributes):
        return int(found.group(1))
    found = _CONDITION.search(loop.attributes)
    condition = program.computations.get(found.group(1), {}) if found else {}
    root = next((own for own in condition.values() if own.is_root), None)
    if root is None:
        return None
    compared = root
    if root.opcode == "fusion" and root.callees:
        body = program.computations.get(root.callees[0], {})
        compared = next((own for own in body.values() if own.is_root), root)
    if compared.opcode != "compare" or "direction=LT" not in compared.attributes:
        return None
    sides = [condition[name] for name in root.operands if name in condition]
    limits = [own.number for own in sides if own.opcode == "constant"]
    counters = [own for own in sides if own.opcode == "get-tuple-element"]
    if len(limits) != 1 or limits[0] is None or len(counters) != 1:
        return None
    return limits[0] - _first_value(loop, counters[0], around)


def _first_value(loop: Instruction, counter: Instruction, around: Computation) -> int:
    """What a loop's counter begins with; 0 where that is not seen."""
    index = _INDEX.search(counter.attributes)
    state = around.get(loop.operands[0]) if loop.operands else None
    if index is None or state is None or state.opcode != "tuple":
        return 0
    first = around.get(state.operands[int(index.group(1))])
    while first is not None and first.opcode in ("copy", "bitcast") and first.operands:
        first = around.get(first.operands[0])
    return first.number or 0 if first is not None and first.opcode == "constant" else 0


def arrays_of(shape: str) -> tuple[ArrayShape, ...]:
    return tuple(
        ArrayShape(
            dtype,
            tuple(int(size) for size in sizes.split(",") if size),
            not (layout and _ELSEWHERE.search(layout)),
        )
        for dtype, sizes, layout in _ARRAY.findall(shape)
    )


def _split_operands(rest: str) -> tuple[str, str]:
    """What stands within the parenthesis that was opened, and what behind it."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    return rest, ""
