"""What a compiled program will do, read from its HLO text, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once. Here each computation's cost is
multiplied by the known trip count of the loop that calls it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from wedlm_jax.hlo_groups import group_of
from wedlm_jax.hlo_text import Computation, Instruction, Program, parse, trip_count
from wedlm_jax.hlo_traffic import hbm_bytes

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([0-9,]*)\}")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# What these call combines two numbers.
_SCALAR_CALLERS = (*COLLECTIVES, "reduce", "scatter", "sort", "reduce-window", "map")


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """Totals of one run of a program, per device.

    Attributes:
      dot_flops: of matrix products; a multiply-add is two. Programs for TPUs write them as
        convolutions, which are not counted.
      hbm_bytes: read and written in main memory: operands and results of each fusion, as
        `wedlm_jax.hlo_traffic` counts them.
      collective_bytes: by kind, the bytes that its results take.
      collective_count: by kind, how often it runs.
      sent_bytes: that leave a device in collectives within a slice, each done as a ring.
      slice_bytes: likewise, in collectives between slices.
      unknown_loops: loops whose trip count the compiler does not know, counted once.
    """

    dot_flops: int
    hbm_bytes: int
    collective_bytes: dict[str, int]
    collective_count: dict[str, int]
    sent_bytes: int
    slice_bytes: int
    unknown_loops: int


@dataclasses.dataclass
class _Totals:
    flops: int = 0
    memory: int = 0
    moved: Counter[str] = dataclasses.field(default_factory=Counter)
    runs: Counter[str] = dataclasses.field(default_factory=Counter)
    sent: Counter[bool] = dataclasses.field(default_factory=Counter)
    unknown_loops: int = 0


def program_cost(
    hlo: str, *, slice_of: Sequence[int] = (), branch: int | None = None
) -> ProgramCost:
    """Costs of the entry computation of ``compiled.as_text()``.

    Matrix products within a custom call (a Pallas kernel) are not seen.

    Args:
      hlo: the text.
      slice_of: the slice of each device, in the order of the mesh; all in one by default.
      branch: which branch of a conditional counts (the last, where there are fewer); all of
        them by default, because which one runs is not known.

    Raises:
      ValueError: there is no entry computation in the text.
    """
    program = parse(hlo)
    total = _Totals()
    _add(total, program, program.entry, 1, partial(_chosen, branch), slice_of, fused=False)
    return ProgramCost(
        total.flops, total.memory, dict(total.moved), dict(total.runs),
        total.sent[False], total.sent[True], total.unknown_loops,
    )  # fmt: skip


def _chosen(branch: int | None, names: list[str]) -> list[str]:
    return names if branch is None or not names else [names[min(branch, len(names) - 1)]]


def _add(
    total: _Totals,
    program: Program,
    name: str,
    times: int,
    chosen: Callable[[list[str]], list[str]],
    slice_of: Sequence[int],
    *,
    fused: bool,
) -> None:
    """Adds ``times`` runs of a computation. Within a fusion nothing goes through HBM."""
    computation = program.computations[name]
    for own in computation.values():
        kind = own.opcode.removesuffix("-start")
        if own.opcode == "dot":
            total.flops += times * _dot_flops(own, computation)
        if kind in COLLECTIVES:
            _add_collective(total, own, kind, computation, times, slice_of)
        if not fused:
            total.memory += times * hbm_bytes(own, computation, program)
        if kind in _SCALAR_CALLERS or own.opcode in ("async-update", "async-done"):
            continue
        trips = trip_count(own, program) if own.opcode == "while" else 1
        total.unknown_loops += trips is None
        for callee in [*own.callees, *chosen(own.branches)]:
            if callee in program.computations:
                inside = fused or own.opcode == "fusion"
                _add(total, program, callee, times * (trips or 1), chosen, slice_of, fused=inside)


def _add_collective(
    total: _Totals,
    own: Instruction,
    kind: str,
    computation: Computation,
    times: int,
    slice_of: Sequence[int],
) -> None:
    parts = [array.bytes for array in own.arrays]
    # What a start yields holds its operands first.
    started = own.opcode != kind and len(parts) > 1
    result = max(parts, default=0) if started else sum(parts)
    if kind == "reduce-scatter" and started:
        result = min(parts)
    total.runs[kind] += times
    total.moved[kind] += times * result
    members = group_of(own.attributes, len(slice_of))
    others = max(len(members) - 1, 0) if members else 1
    share = others / len(members) if members else 1.0
    sent = {
        "all-gather": share * result,
        "all-reduce": 2 * share * result,
        "reduce-scatter": others * result,
        "all-to-all": share * result,
        "collective-permute": result,
    }[kind]
    crosses = len({slice_of[member] for member in members if member < len(slice_of)}) > 1
    total.sent[crosses] += int(times * sent)


def _dot_flops(own: Instruction, computation: Computation) -> int:
    contracted = _CONTRACTED.search(own.attributes)
    if contracted is None or not own.operands:
        return 0
    left = computation[own.operands[0]].arrays[0].sizes
    width = math.prod(left[int(axis)] for axis in contracted.group(1).split(",") if axis)
    return 2 * math.prod(own.arrays[0].sizes) * width
