"""How many devices a collective joins, read from its HLO text."""

from __future__ import annotations

import re

_LISTED = re.compile(r"\breplica_groups=\{\{([0-9,]*)\}")
_IOTA = re.compile(r"\breplica_groups=\[(?:[0-9,]+,)?([0-9]+)\]<=\[")


def group_size(attributes: str, devices: int) -> int:
    """Devices of the collective's first group, the others being like it. Without groups in the
    text, or with empty ones, all ``devices``."""
    if found := _LISTED.search(attributes):
        return len(found.group(1).split(","))
    if found := _IOTA.search(attributes):
        return int(found.group(1))
    return devices
