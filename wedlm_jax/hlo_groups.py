"""Which devices a collective joins, read from its HLO text."""

from __future__ import annotations

import math
import re

import numpy as np

_LISTED = re.compile(r"\breplica_groups=\{\{([0-9,]*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")


def group_of(attributes: str, devices: int) -> list[int]:
    """The devices of the collective's first group, the others being like it.

    Of a permutation: a pair that is farthest apart in the order of the mesh, which leaves
    its slice if any does. Empty groups mean all ``devices``.
    """
    if found := _LISTED.search(attributes):
        return [int(device) for device in found.group(1).split(",") if device]
    if found := _IOTA.search(attributes):
        shape, source = (_numbers(found.group(i)) for i in (1, 2))
        ids = np.arange(math.prod(source)).reshape(source)
        if found.group(3):
            ids = ids.transpose(_numbers(found.group(3)))
        return [int(device) for device in ids.reshape(shape)[0]]
    if found := _PAIRS.search(attributes):
        pairs = re.findall(r"\{(\d+),(\d+)\}", found.group(1))
        return max(([int(a), int(b)] for a, b in pairs), key=lambda pair: abs(pair[0] - pair[1]))
    return list(range(devices))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
