"""Grouped-query attention under a mask specification: one dispatch, several named forms."""

from wedlm_jax.attention.dispatch import (
    IMPLEMENTATIONS,
    WINDOW_IMPLEMENTATIONS,
    attend,
    check_runs_on,
    reads_live_part,
    window_implementation,
)

__all__ = [
    "IMPLEMENTATIONS",
    "WINDOW_IMPLEMENTATIONS",
    "attend",
    "check_runs_on",
    "reads_live_part",
    "window_implementation",
]
