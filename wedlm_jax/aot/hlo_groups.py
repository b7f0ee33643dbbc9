"""How many devices a collective joins, read from its HLO text."""

from __future__ import annotations

import math
import re

_LISTED = re.compile(r"\breplica_groups=\{\{([0-9,]*)\}")
_MESH = re.compile(r"\breplica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_IOTA = re.compile(r"\breplica_groups=\[(?:[0-9,]+,)?([0-9]+)\]<=\[")


def group_size(attributes: str, devices: int) -> int:
    """Devices of the collective's first group, the others being like it. Without groups in the
    text, or with empty ones, all ``devices``."""
    if found := _LISTED.search(attributes):
        return len(found.group(1).split(","))
    if found := _IOTA.search(attributes):
        return int(found.group(1))
    if found := _MESH.search(attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found.group(1)))
        axes = re.findall(r"'(\w+)'", found.group(2))
        if all(axis in sizes for axis in axes):
            return math.prod(int(sizes[axis]) for axis in axes)
    return devices
