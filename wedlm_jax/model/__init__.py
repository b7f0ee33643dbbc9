"""The transformer: its layers, how they lie in memory, RoPE, and weights of 8 bits."""

from wedlm_jax.model.transformer import Transformer

__all__ = ["Transformer"]
