"""Bytes that a compiled program moves through a chip's main memory.

A fusion reads its operands and writes its result, each once; what it computes in between
stays on the chip. Of an operand that it only slices, the slice counts; of a result that it
only updates in place, the update. So does a kernel, whose own repeated reading is not seen,
unless it says itself how many bytes it reads and writes.
Arrays that the compiler holds in the chip's vector memory do not count, nor does what a fusion
hands on of a collective that is under way: who counts the collective counts its bytes.
"""

from __future__ import annotations

import re

from wedlm_jax.aot.hlo_text import Computation, HloProgram, Instruction

# What moves nothing, or is counted where it calls.
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "partition-id",
        "replica-id",
        "iota",
        "opt-barrier",
        "optimization-barrier",
        "async-start",
        "async-update",
        "async-done",
        "copy-done",
        "all-gather-done",
        "all-reduce-done",
        "collective-permute-done",
        "send",
        "send-done",
        "recv",
        "recv-done",
        "domain",
        "add-dependency",
    }
)
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_SAID_BY_KERNEL = re.compile(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)')
_SLICES = ("dynamic-slice", "slice", "gather")


def hbm_bytes(own: Instruction, computation: Computation, program: HloProgram) -> int:
    """What one run of an instruction reads and writes; computations that it calls apart, but
    for a fusion's."""
    if own.opcode in _FREE:
        return 0
    if own.opcode == "fusion" and (bodies := [c for c in own.callees if c in program.computations]):
        body = program.computations[bodies[0]]
        read = sum(
            _parameter_bytes(i, body, program, _size(computation.get(name)))
            for i, name in enumerate(own.operands)
        )
        return read + _root_bytes(own, body, program)
    if own.opcode == "custom-call" and (said := _SAID_BY_KERNEL.search(own.attributes)):
        return int(said.group(1))
    if own.opcode in _SLICES:
        return 2 * _size(own)
    if own.opcode == "dynamic-update-slice":
        return 2 * _size(computation.get(own.operands[1]))
    read = sum(_size(computation.get(name)) for name in own.operands)
    # What a start yields holds its operands, too, and in part in other memory.
    return read + max(_size(own) - (read if own.opcode.endswith("-start") else 0), 0)


def _size(own: Instruction | None) -> int:
    """Bytes of what an instruction yields that lie in main memory."""
    return sum(array.bytes for array in own.arrays if array.in_hbm) if own else 0


def _parameter_bytes(index: int, body: Computation, program: HloProgram, whole: int) -> int:
    """What a fusion reads of its operand ``index``, of ``whole`` bytes in main memory."""
    if not whole:
        return 0
    parameter = next((own for own in body.values() if own.number == index), None)
    return whole if parameter is None else min(whole, _used(parameter, body, program, whole))


def _used(own: Instruction, body: Computation, program: HloProgram, whole: int) -> int:
    total = 0
    for user in body.values():
        for place, name in enumerate(user.operands):
            if name == own.name:
                total += _used_by(user, place, body, program, whole)
    return total


def _used_by(
    user: Instruction, place: int, body: Computation, program: HloProgram, whole: int
) -> int:
    if user.opcode in ("bitcast", "copy", "reshape", "convert") and not user.is_root:
        return _used(user, body, program, whole)
    if _under_way(user):
        return 0
    if user.opcode in _SLICES and place == 0:
        return sum(array.bytes for array in user.arrays)
    if user.opcode == "dynamic-update-slice" and place == 0:
        return 0
    if user.opcode == "fusion" and (callees := user.callees):
        return _parameter_bytes(place, program.computations[callees[0]], program, whole)
    return whole


def _under_way(own: Instruction) -> bool:
    return own.opcode in COLLECTIVES or (
        own.opcode == "custom-call" and "AsyncCollective" in own.attributes
    )


def _root_bytes(own: Instruction, body: Computation, program: HloProgram) -> int:
    """What a fusion writes: of an update in place, the update."""
    root = next((part for part in body.values() if part.is_root), None)
    outputs = own.arrays
    if root is None:
        return _size(own)
    if _under_way(root):
        return 0
    parts = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(parts) != len(outputs):
        return _size(own)
    return sum(
        _written(part, body, program, array.bytes)
        for part, array in zip(parts, outputs, strict=True)
        if array.in_hbm
    )


def _written(part: Instruction, body: Computation, program: HloProgram, whole: int) -> int:
    start = part
    while part.opcode in ("bitcast", "get-tuple-element", "dynamic-slice") and part.operands:
        if part.operands[0] not in body:
            break
        part = body[part.operands[0]]
    if _under_way(part):
        return 0
    part = start
    while part.opcode == "bitcast" and part.operands[0] in body:
        part = body[part.operands[0]]
    if part.opcode == "dynamic-update-slice":
        return min(whole, sum(array.bytes for array in body[part.operands[1]].arrays))
    if part.opcode == "fusion" and part.callees and len(part.arrays) == 1:
        return min(whole, _root_bytes(part, program.computations[part.callees[0]], program))
    return whole
