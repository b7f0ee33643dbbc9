"""Counts the bytes that a compiled program moves through a chip's main memory.

A fusion reads its operands and writes its result, each once; what it computes in between stays on
the chip. If it only slices an operand, the slice counts; if it only updates its result in place,
the update counts. A kernel counts in the same way, although it may read data repeatedly, unless it
declares how many bytes it reads and writes. Arrays in the chip's vector memory do not count, nor
does what a fusion passes on from a collective in progress, whose bytes are counted with the
collective.
"""

from __future__ import annotations

import re

from wedlm_jax.aot.hlo import Computation, HloProgram, Instruction, root_of

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# These move nothing, or are counted in the computations that they call.
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|iota|partition-id|replica-id|while|call|"
    "conditional|async-start|async-update|send|recv|after-all|add-dependency|opt-barrier|.*-done"
)
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "copy", "reshape", "convert")
_PASSED_ON = ("bitcast", "get-tuple-element", "dynamic-slice")
_KERNEL_BYTES = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')


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
