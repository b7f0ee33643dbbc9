"""Grouped-query attention: under a mask for training, over pages for decoding."""

from wedlm_jax.attention.dispatch import IMPLEMENTATIONS, attend, check_runs_on

__all__ = ["IMPLEMENTATIONS", "attend", "check_runs_on"]
