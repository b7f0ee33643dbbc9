"""wedlm-jax: causal diffusion language models in JAX.

    from wedlm_jax import LLM, SamplingParams
    LLM().generate("...", SamplingParams(max_tokens=64))

Names are loaded when first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wedlm_jax.completion import Chunk, Completion
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Chunk", "Completion", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "wedlm_jax.llm",
    "Chunk": "wedlm_jax.completion",
    "Completion": "wedlm_jax.completion",
    "SamplingParams": "wedlm_jax.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
