"""Few sizes for many lengths, so that few programs are compiled."""

from __future__ import annotations


def bucket(size: int, smallest: int) -> int:
    """The smallest power of two times ``smallest`` that holds ``size``."""
    while smallest < size:
        smallest *= 2
    return smallest
