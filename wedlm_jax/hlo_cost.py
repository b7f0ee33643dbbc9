"""What a compiled program will do, read from its HLO text, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once. Here each computation's cost is
multiplied by the known trip count of the loop that calls it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = re.compile(r"\b(?:calls|body|to_apply|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([0-9,]*)\}")
_OPERAND = re.compile(r"%([\w.\-]+)")

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4,
          "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Totals of one run of a program, per device.

    Attributes:
      dot_flops: of matrix products; a multiply-add is two.
      collective_bytes: by kind, the bytes that its results take.
      collective_count: by kind, how often it runs.
      unknown_loops: loops whose trip count the compiler does not know, counted once.
    """

    dot_flops: int
    collective_bytes: dict[str, int]
    collective_count: dict[str, int]
    unknown_loops: int


@dataclasses.dataclass
class _Computation:
    flops: int = 0
    moved: Counter[str] = dataclasses.field(default_factory=Counter)
    runs: Counter[str] = dataclasses.field(default_factory=Counter)
    unknown_loops: int = 0
    calls: list[tuple[str, int]] = dataclasses.field(default_factory=list)


def program_cost(hlo: str) -> ProgramCost:
    """Costs of the entry computation of ``compiled.as_text()``.

    Branches of a conditional all count, because which one runs is not known. Matrix products
    within a custom call (a Pallas kernel) are not seen.

    Raises:
      ValueError: there is no entry computation in the text.
    """
    computations: dict[str, _Computation] = {}
    entry = None
    for name, is_entry, lines in _computations(hlo):
        computations[name] = _read(lines)
        entry = name if is_entry else entry
    if entry is None:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    total = _Computation()
    _add(total, computations, entry, 1)
    return ProgramCost(total.flops, dict(total.moved), dict(total.runs), total.unknown_loops)


def _computations(hlo: str) -> Iterator[tuple[str, bool, list[str]]]:
    name: str | None = None
    is_entry, lines = False, list[str]()
    for line in hlo.splitlines():
        if name is None:
            if found := _COMPUTATION.match(line):
                name, is_entry, lines = found.group(2), found.group(1) is not None, []
        elif line.startswith("}"):
            yield name, is_entry, lines
            name = None
        else:
            lines.append(line)


def _read(lines: list[str]) -> _Computation:
    shapes: dict[str, str] = {}
    own = _Computation()
    for line in lines:
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        name, shape, opcode, rest = found.groups()
        shapes[name] = shape
        if opcode == "dot":
            own.flops += _dot_flops(shape, rest, shapes)
        kind = opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            own.runs[kind] += 1
            own.moved[kind] += _result_bytes(shape, started=opcode != kind)
        times = 1
        if opcode == "while":
            trips = _TRIP_COUNT.search(rest)
            times = int(trips.group(1)) if trips else 1
            own.unknown_loops += trips is None
        if kind in COLLECTIVES or opcode in ("reduce", "scatter", "sort", "reduce-window", "map"):
            continue  # what they call combines two numbers
        own.calls += [(callee, times) for callee in _CALLS.findall(rest)]
        for branches in _BRANCHES.findall(rest):
            own.calls += [(callee, 1) for callee in _OPERAND.findall(branches)]
    return own


def _add(total: _Computation, known: dict[str, _Computation], name: str, times: int) -> None:
    own = known[name]
    total.flops += own.flops * times
    total.unknown_loops += own.unknown_loops
    for kind in own.runs:
        total.runs[kind] += own.runs[kind] * times
        total.moved[kind] += own.moved[kind] * times
    for callee, trips in own.calls:
        if callee in known:
            _add(total, known, callee, times * trips)


def _dot_flops(shape: str, rest: str, shapes: dict[str, str]) -> int:
    contracted = _CONTRACTED.search(rest)
    left = _OPERAND.search(rest)
    if contracted is None or left is None:
        return 0
    sizes = _arrays(shapes[left.group(1)])[0][1]
    width = math.prod([sizes[int(axis)] for axis in contracted.group(1).split(",") if axis])
    return 2 * math.prod(_arrays(shape)[0][1]) * width


def _result_bytes(shape: str, *, started: bool) -> int:
    """Bytes of a collective's result. What a start yields holds its operands first."""
    parts = [math.prod(sizes) * _BYTES.get(dtype, 4) for dtype, sizes in _arrays(shape)]
    return max(parts, default=0) if started and len(parts) > 1 else sum(parts)


def _arrays(shape: str) -> list[tuple[str, list[int]]]:
    """The dtype and the sizes of each array of a shape or tuple of shapes."""
    return [
        (dtype, [int(size) for size in sizes.split(",") if size])
        for dtype, sizes in _SHAPE.findall(shape)
    ]
