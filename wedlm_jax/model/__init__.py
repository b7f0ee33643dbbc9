"""The transformer: its layers and their layouts, RoPE, adapters, losses and 8-bit weights."""

from wedlm_jax.model.transformer import Transformer

__all__ = ["Transformer"]
