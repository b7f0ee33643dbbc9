"""The transformer: its layers, how they lie in memory, RoPE, and weights of 8 bits."""

from wedlm_jax.model.transformer import REMAT_POLICIES, Transformer

__all__ = ["REMAT_POLICIES", "Transformer"]
