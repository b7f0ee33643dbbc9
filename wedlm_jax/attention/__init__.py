"""Grouped-query attention under a mask specification: one dispatch, several named forms."""

from wedlm_jax.attention.dispatch import IMPLEMENTATIONS, attend

__all__ = ["IMPLEMENTATIONS", "attend"]
